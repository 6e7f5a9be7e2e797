"""Compiles kernels by NVRTC and links them by nvJitLink: at start, without a toolkit, and once per machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from gpu_runtime.cuda.errors import CudaError, check
from gpu_runtime.cuda.sources import include_roots, included_files
from gpu_runtime.cuda.toolkit import device_runtime_library, header_folder

_STANDARD_HEADERS = {
    "cstdint": """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef unsigned long long uintptr_t; typedef long long intptr_t;
""",
    "cstddef": """#pragma once
typedef unsigned long size_t; typedef long ptrdiff_t;
""",
}
"""NVRTC has no standard library; this is all of it that our headers use."""


def compile_kernels(source: Path, architecture: str, *, device_runtime: bool = False) -> bytes:
    """The cubin of a `.cu` file for an architecture such as "sm_90a", from the cache where it was built before.

    Args:
        source: with `extern "C"` kernels; includes are looked up beside it, in `gpu_runtime/`, in `proto/` and in CUDA.
        device_runtime: link CUDA's device runtime, for kernels that launch graphs.

    Raises:
        CudaError: the compiler's or linker's log, or what is missing.
    """
    options = _options(architecture, relocatable=device_runtime)
    path = cache_folder() / f"{source.stem}-{_key(source, options, architecture)}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = _compile(source, options)
    if device_runtime:
        cubin = _link(cubin, architecture)
    _store(path, cubin)
    return cubin


def cache_folder() -> Path:
    """Where built kernels are kept: $XDG_CACHE_HOME/blink/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blink" / "kernels"


def _options(architecture: str, *, relocatable: bool) -> list[str]:
    return [
        f"--gpu-architecture={architecture}",
        "--std=c++20",
        "--extra-device-vectorization",
        "--device-as-default-execution-space",
        "--generate-line-info",
        f"--relocatable-device-code={'true' if relocatable else 'false'}",
    ]


def _key(source: Path, options: list[str], architecture: str) -> str:
    """Everything that the result depends on."""
    from cuda.bindings import nvjitlink, nvrtc

    versions = check(nvrtc.nvrtcVersion()), nvjitlink.version()
    digest = hashlib.sha256(repr((options, architecture, versions)).encode())
    for path in included_files(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in _STANDARD_HEADERS.values():
        digest.update(text.encode())
    digest.update(_toolkit_digest())
    return digest.hexdigest()[:32]


@cache
def _toolkit_digest() -> bytes:
    """CUDA's own headers count by the one that holds their version."""
    version = header_folder() / "cuda_runtime_api.h"
    return hashlib.sha256(version.read_bytes() + device_runtime_library().read_bytes()).digest()


def _compile(source: Path, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    includes = [f"--include-path={root}" for root in (source.parent, *include_roots(), header_folder())]
    flags = [option.encode() for option in (*options, *includes)]
    names = [name.encode() for name in _STANDARD_HEADERS]
    texts = [text.encode() for text in _STANDARD_HEADERS.values()]
    program = check(
        nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(names), texts, names),
    )
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(status) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(f"{source.name} does not compile:\n{log.decode(errors='replace').strip(chr(0))}")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin)


def _link(cubin: bytes, architecture: str) -> bytes:
    from cuda.bindings import nvjitlink

    handle: Any = nvjitlink.create(1, [f"-arch={architecture}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.CUBIN, cubin, len(cubin), "kernels")
        nvjitlink.add_file(handle, nvjitlink.InputType.LIBRARY, str(device_runtime_library()))
        nvjitlink.complete(handle)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise CudaError(f"linking failed: {error}\n{log.decode(errors='replace')}") from error
    linked = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, linked)
    nvjitlink.destroy(handle)
    return bytes(linked)


def _store(path: Path, cubin: bytes) -> None:
    """Whole or not at all, also when two processes build at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)
