// Stands in for libcuda.so.1 and libnvidia-ml.so.1: two devices, the second one without dma-buf, and one board.
#include <stdio.h>
#include <string.h>

int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int* version) { return *version = 13010, 0; }
int cuDeviceGetCount(int* count) { return *count = DEVICES, 0; }
int cuDeviceGet(int* device, int index) { return *device = 40 + index, 0; }

int cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, size, "NVIDIA Stand-in %d", device - 40);
  return 0;
}

int cuDeviceGetPCIBusId(char* address, int size, int device) {
  snprintf(address, size, "0000:%02X:00.0", 0x1A + device - 40);
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case COMPUTE_CAPABILITY_MAJOR: return *value = 9, 0;
    case COMPUTE_CAPABILITY_MINOR: return *value = 0, 0;
    case GPU_DIRECT_RDMA_SUPPORTED: return *value = 1, 0;
    case GPU_DIRECT_RDMA_WRITES_ORDERING: return *value = 100, 0;
    case DMA_BUF_SUPPORTED: return *value = device == 40, 0;
  }
  return 1;  // CUDA_ERROR_INVALID_VALUE
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 1, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { return *device = "board", index != 0; }

static int wrong(const void* device) { return strcmp(device, "board") ? 2 : 0; }

int nvmlDeviceGetName(void* device, char* name, unsigned size) {
  snprintf(name, size, "NVIDIA Stand-in");
  return wrong(device);
}

int nvmlDeviceGetBAR1MemoryInfo(void* device, unsigned long long* memory) {
  memory[0] = 512ull << 20;
  memory[1] = 500ull << 20;
  memory[2] = 12ull << 20;
  return wrong(device);
}

int nvmlDeviceGetPersistenceMode(void* device, int* mode) { return *mode = 1, wrong(device); }
int nvmlDeviceGetClockInfo(void* device, int kind, unsigned* clock) { return *clock = 1200, wrong(device) | (kind != 1); }
int nvmlDeviceGetMaxClockInfo(void* device, int kind, unsigned* clock) { return *clock = 1980, wrong(device) | (kind != 1); }

int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  *reasons = 0x8;  // hardware slowdown
  return wrong(device);
}
