"""Turns a layout specification (TOML) into a C++ header, a Python codec and a documentation table.

`python -m blink_proto.generate` rewrites the generated files of this repository, and `--check` fails when one
of them differs from what the specifications say. The gRPC stubs are generated here too, so that one command
tells whether anything is stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from blink_proto.render_cpp import render_cpp
from blink_proto.render_markdown import render_markdown
from blink_proto.render_python import render_python
from blink_proto.spec import Spec, load_spec

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent.parent


def layout_outputs() -> dict[Path, str]:
    """Path and content of every file that comes from a layout specification."""
    arena = load_spec(PACKAGE / "arena.toml")
    outputs = {
        PACKAGE / "arena.h": render_cpp(arena),
        PACKAGE / "arena.py": render_python(arena),
        PACKAGE.parent / "ARENA.md": render_markdown(arena),
    }
    scheduler = REPOSITORY / "gpu_runtime" / "scheduler"
    if (scheduler / "layout.toml").exists():
        private: Spec = load_spec(scheduler / "layout.toml")
        outputs[scheduler / "layout.h"] = render_cpp(private)
        outputs[scheduler / "layout.py"] = render_python(private)
    return outputs


def stub_outputs() -> dict[Path, str]:
    """Path and content of the gRPC stubs of `control.proto`.

    Raises:
        RuntimeError: grpcio-tools refused the file.
    """
    from blink_proto.stubs import generate_stubs

    return generate_stubs(PACKAGE)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m blink_proto.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file is stale")
    arguments = parser.parse_args(argv)
    stale = []
    for path, content in {**layout_outputs(), **stub_outputs()}.items():
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(path.relative_to(REPOSITORY))
        if not arguments.check:
            path.write_text(content, encoding="utf-8")
    for name in stale:
        print(f"{'stale' if arguments.check else 'written'}: {name}")
    if arguments.check and stale:
        print("run `make generate` and commit the result", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
