// Eight floats at a time, in portable vector extensions; BLINK_CLONES compiles a function once for each instruction
// set and picks at load time. Inlined helpers take the instruction set of the function they end up in.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define BLINK_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define BLINK_X86_V4 __attribute__((target("arch=x86-64-v4")))
#else
#define BLINK_CLONES
#endif
#define BLINK_INLINE inline __attribute__((always_inline))
#define BLINK_EXPORT __attribute__((visibility("default")))

namespace blink {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

// Memory is only known to be aligned to a float. (A plain cast would promise 32 bytes.)
BLINK_INLINE void load(const float* from, Floats& to) { memcpy(&to, from, sizeof(to)); }
BLINK_INLINE void store(float* to, const Floats& from) { memcpy(to, &from, sizeof(from)); }

// Sum of the lanes, always in the same order: halves, quarters, the last two.
BLINK_INLINE float sum_lanes(const Floats& v) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad low, high;
  memcpy(&low, &v, sizeof(low));
  memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
  const Quad four = low + high;
  const Quad two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}

// e^x for x <= 0, relative error below 3e-7 (checked in the tests); below -87 the result is 0. Range reduction by
// ln 2 in two parts, then a Taylor polynomial of degree 6 on [-ln2/2, ln2/2].
BLINK_INLINE void exp_negative(Floats& x) {
  const Floats log2e = Floats{} + 1.44269504088896341f;
  const Floats magic = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Ints tiny = x < -87.0f;
  const Floats scaled = (x * log2e + magic) - magic;
  const Floats r = (x - scaled * 0.693359375f) - scaled * -2.12194440e-4f;
  Floats p = Floats{} + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints exponent = (__builtin_convertvector(scaled, Ints) + 127) << 23;
  Floats power;
  memcpy(&power, &exponent, sizeof(power));
  p = p * power;
  x = tiny ? Floats{} : p;
}

}  // namespace blink
