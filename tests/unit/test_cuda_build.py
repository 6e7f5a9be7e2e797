"""Kernels are compiled at start, without a toolkit: what comes out, what is kept, and what is said when it fails.

No GPU is needed: compiling is the host's work.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_runtime
from gpu_runtime.cuda import build, sources, toolkit
from gpu_runtime.cuda.build import cache_folder, compile_kernels
from gpu_runtime.cuda.errors import CudaError
from gpu_runtime.kernels.gpu.skinny import MAX_TOKENS, schedule

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed (extra cuda)")

PACKAGE = Path(gpu_runtime.__file__).parent
HOPPER = "sm_90a"
CHAIN, SAMPLING, SKINNY = (
    PACKAGE / name for name in ("chain/chain.cu", "kernels/gpu/sampling.cu", "kernels/gpu/skinny.cu")
)
BY_NVCC = {PACKAGE / "scheduler/device.cu"}
"""Compiled as a host library for tests (tests/gpu/build.py)."""

SMALL = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = VALUE; }\n'


def skinny_names() -> set[str]:
    """Every kernel that the host may ask for, over shapes of models from 135M to 70B on 132 multiprocessors."""
    shapes = [(576, 960), (1536, 576), (2048, 8192), (4096, 6144), (14336, 4096), (4096, 128256), (8192, 57344)]
    kinds = ("project", "project_float", "residual", "gated")
    cuts = {
        (kind, cut.tokens, cut.pieces)
        for kind in kinds
        for tokens in range(1, MAX_TOKENS + 1)
        for columns, units in shapes
        for cut in [schedule(kind, tokens, columns, units, 132 if tokens > 32 else 264)]
    }
    return {f"skinny_{kind}_{tokens}x{pieces}" for kind, tokens, pieces in cuts}


KERNELS = {
    CHAIN: {"blink_begin", "blink_pull", "blink_poll", "blink_tail"},
    SAMPLING: {"blink_sample_rows"},
    SKINNY: skinny_names(),
}


def functions_of(cubin: bytes) -> set[str]:
    """Names of the global functions in the symbol table of an ELF file of 64 bits, little-endian (System V gABI)."""
    assert cubin[:6] == b"\x7fELF\x02\x01"
    (sections_at,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<2H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q2I2Q", cubin, sections_at + index * size) for index in range(count)]
    found = set()
    for _, kind, _, _, at, length, link, _, _, entry in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings_at = sections[link][4]
        for symbol in range(at, at + length, entry):
            name_at, info = struct.unpack_from("<IB", cubin, symbol)
            if info == 0x12:  # STB_GLOBAL, STT_FUNC
                start = strings_at + name_at
                found.add(cubin[start : cubin.index(b"\0", start)].decode())
    return found


def machine_of(cubin: bytes) -> int:
    """The ELF header's machine; 190 is CUDA's."""
    return int(struct.unpack_from("<H", cubin, 18)[0])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "blink" / "kernels"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A kernel that takes its number from a header, which takes it from another one."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "inner.h").write_text("#define VALUE 7\n")
    (folder / "outer.h").write_text('#pragma once\n#include "inner.h"\n')
    (folder / "small.cu").write_text('#include "outer.h"\n' + SMALL)
    return folder / "small.cu"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that went through the compiler."""
    seen: list[str] = []
    compiler = build._compile

    def counted(source: Path, options: list[str]) -> bytes:
        seen.append(source.name)
        return compiler(source, options)

    monkeypatch.setattr(build, "_compile", counted)
    return seen


def test_every_source_is_known() -> None:
    """A new .cu file belongs into this test."""
    assert set(PACKAGE.rglob("*.cu")) - BY_NVCC == set(KERNELS)


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_kernels_compile_for_hopper(source: Path, cache: Path) -> None:
    cubin = compile_kernels(source, HOPPER, device_runtime=source == CHAIN)
    assert machine_of(cubin) == 190
    assert functions_of(cubin) >= KERNELS[source]


@pytest.mark.parametrize("source", [CHAIN, SAMPLING], ids=lambda path: path.stem)
def test_kernels_compile_for_newer_devices(source: Path, cache: Path) -> None:
    """Blackwell (the skinny kernels compile for it as well, but take long)."""
    cubin = compile_kernels(source, "sm_100a", device_runtime=source == CHAIN)
    assert functions_of(cubin) >= KERNELS[source]


def test_a_second_time_it_is_read(small: Path, cache: Path, compilations: list[str]) -> None:
    first = compile_kernels(small, HOPPER)
    assert functions_of(first) == {"fill"}
    (path,) = cache.iterdir()
    assert path.name.startswith("small-")
    assert path.suffix == ".cubin"
    written = path.stat().st_mtime_ns
    assert compile_kernels(small, HOPPER) == first
    assert compilations == ["small.cu"]
    assert (list(cache.iterdir()), path.stat().st_mtime_ns) == ([path], written)
    path.write_bytes(b"what lies there")
    assert compile_kernels(small, HOPPER) == b"what lies there"


def test_the_cache_lies_where_the_user_wants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "blink" / "kernels"


@pytest.mark.parametrize("changed", ["small.cu", "outer.h", "inner.h"])
def test_whatever_is_included_counts(small: Path, cache: Path, compilations: list[str], changed: str) -> None:
    """Also a header that only another header includes, and even where just a comment changes."""
    compile_kernels(small, HOPPER)
    path = small.with_name(changed)
    path.write_text(path.read_text() + "// another\n")
    compile_kernels(small, HOPPER)
    assert len(compilations) == len(list(cache.iterdir())) == 2


def test_architecture_and_device_runtime_count(small: Path, cache: Path, compilations: list[str]) -> None:
    made = {
        compile_kernels(small, architecture, device_runtime=runtime)
        for architecture in (HOPPER, "sm_80")
        for runtime in (False, True)
    }
    assert len(made) == len(compilations) == len(list(cache.iterdir())) == 4
    assert all("fill" in functions_of(cubin) for cubin in made)


def test_the_compiler_is_heard(small: Path, cache: Path) -> None:
    """The log has file, line and message; nothing is kept."""
    small.write_text(small.read_text() + "__device__ int broken() { return nowhere; }\n")
    with pytest.raises(CudaError, match=r"small\.cu does not compile") as error:
        compile_kernels(small, HOPPER)
    assert "small.cu(3): error" in str(error.value)
    assert 'identifier "nowhere" is undefined' in str(error.value)
    assert not cache.exists()


def test_the_linker_is_heard(small: Path, cache: Path) -> None:
    """Only what is linked with the device runtime can name a function that is nowhere."""
    text = "extern __device__ int nowhere();\n" + SMALL.replace("VALUE", "nowhere()")
    small.write_text(text)
    with pytest.raises(CudaError, match="linking failed") as error:
        compile_kernels(small, HOPPER, device_runtime=True)
    assert "nowhere" in str(error.value)


def test_an_unknown_architecture(small: Path, cache: Path) -> None:
    with pytest.raises(CudaError, match="invalid value for --gpu-architecture"):
        compile_kernels(small, "sm_9000")


def test_a_header_that_is_not_there(small: Path, cache: Path) -> None:
    small.write_text('#include "gone.h"\n' + SMALL)
    with pytest.raises(FileNotFoundError, match=r"gone\.h"):
        compile_kernels(small, HOPPER)


def test_without_a_toolkit(small: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing and which package has it."""
    build._toolkit_digest.cache_clear()
    monkeypatch.setattr(toolkit, "_roots", lambda: iter([tmp_path / "nothing"]))
    with pytest.raises(CudaError, match=r"cuda_runtime\.h is missing.*nvidia-cuda-runtime"):
        compile_kernels(small, HOPPER)
    (tmp_path / "nothing" / "include").mkdir(parents=True)
    for name in ("cuda_runtime.h", "cuda_runtime_api.h"):
        (tmp_path / "nothing" / "include" / name).write_text("")
    with pytest.raises(CudaError, match=r"libcudadevrt\.a is missing.*nvidia-cuda-runtime"):
        compile_kernels(small, HOPPER, device_runtime=True)
    build._toolkit_digest.cache_clear()


def test_a_toolkit_is_found_by_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_HOME is asked after pip's packages, before the usual place."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    places = list(toolkit._roots())
    assert places[-2:] == [tmp_path, Path("/usr/local/cuda")]


def test_two_processes_at_once(small: Path, cache: Path) -> None:
    """Both get the kernel; one whole file is left and nothing beside it."""
    code = (
        "import sys; from pathlib import Path; from gpu_runtime.cuda.build import compile_kernels; "
        "print('there', flush=True); sys.stdin.readline(); "
        f"sys.stdout.write(compile_kernels(Path(sys.argv[1]), {HOPPER!r}).hex())"
    )
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(small)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    built = [bytes.fromhex(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (path,) = cache.iterdir()
    assert built == [path.read_bytes()] * 2


def test_included_files_are_followed_once(tmp_path: Path) -> None:
    """Beside the including file first, then in our own roots; circles end; system headers are left alone."""
    for name, text in {
        "a.cu": '#include "b.h"\n#include "kernels/philox.h"\n#include <cstdint>\n',
        "b.h": '#include "c.h"\n',
        "c.h": '  #  include "b.h"\n// #include "no.h"\n',
    }.items():
        (tmp_path / name).write_text(text)
    found = sources.included_files(tmp_path / "a.cu")
    assert found[:3] == [tmp_path / "a.cu", tmp_path / "b.h", PACKAGE / "kernels" / "philox.h"]
    assert tmp_path / "c.h" in found
    assert len(found) == len(set(found))
