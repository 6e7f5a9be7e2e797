"""`blink`: both programs on one machine."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer
from rich.console import Console

from blink_deploy.client import ControlClient
from blink_deploy.devices import Runtime, device_of, share_of_cores
from blink_deploy.output import plain
from blink_deploy.programs import Program, StartError, StopSignals, stop_all, wait_first_end, wait_ready
from blink_deploy.usage import usage_text
from blink_proto.dial import Dial

DEFAULT_MODEL = "smollm2-135m-instruct"
START_SECONDS = 600.0
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_show_locals=False)
console = Console(stderr=True, markup=False, emoji=False)


@app.callback()
def _commands() -> None:
    """Blink: LLM serving without the host CPU."""


@app.command()
def up(
    model: Annotated[
        str, typer.Option(help="Hugging Face folder, GGUF file or the built-in default's name.")
    ] = DEFAULT_MODEL,
    name: Annotated[str, typer.Option(help="Name that clients use for the model; default: its own.")] = "",
    device: Annotated[str, typer.Option(help="cpu: the soft GPU. cuda: CUDA devices, the first ones.")] = "cpu",
    gpus: Annotated[
        int, typer.Option(min=1, max=64, help="Runtimes behind the one front end, each with a device of its own.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32; default: bfloat16 on CUDA.")] = "",
    random_weights: Annotated[bool, typer.Option(help="Measure without the weights: the folder needs none.")] = False,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    https_port: Annotated[int, typer.Option(help="0 switches HTTPS off.")] = 8443,
    http_port: Annotated[int, typer.Option(help="0 switches HTTP off.")] = 8000,
    grpc_port: Annotated[
        int, typer.Option(help="Control plane, on loopback; of further runtimes the next ones.")
    ] = 50051,
    tls_cert: Annotated[str, typer.Option(help="PEM certificate chain; default: a self-signed one.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM key of --tls-cert.")] = "",
    api_keys: Annotated[str, typer.Option(help="File of tenants and their keys; default: anybody may ask.")] = "",
    workers: Annotated[int, typer.Option(help="Front-end workers; 0: by the number of cores.")] = 0,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds; 0: by the device.")] = 0,
    grace: Annotated[float, typer.Option(help="Seconds to finish running requests at the end.")] = 20.0,
    gpu_args: Annotated[str, typer.Option(help="Further options of blink-gpu (see there), in one string.")] = "",
    dpu_args: Annotated[str, typer.Option(help="Further options of blink-dpu (see there), in one string.")] = "",
) -> None:
    """Starts both programs, waits until they serve, and runs until Ctrl-C."""
    gpu = ["--device", device, "--model", model, "--name", name]
    gpu += ["--kv-tokens", str(kv_tokens), "--grace", str(grace), "--dtype", dtype]
    gpu += [*(["--random-weights"] if random_weights else []), *share_of_cores(device, gpus), *shlex.split(gpu_args)]
    runtimes = [Runtime(f"127.0.0.1:{grpc_port + i}", gpu, device_of(device, i, gpus)) for i in range(gpus)]
    dpu = ["--workers", str(workers), "--grace", str(grace)]
    dpu += [word for runtime in runtimes for word in ("--runtime", runtime.control)]
    dpu += ["--https", _address(host, https_port), "--http", _address(host, http_port)]
    dpu += ["--api-keys", api_keys] if api_keys else []
    dpu += ["--tls-cert", tls_cert, "--tls-key", tls_key, *shlex.split(dpu_args)]
    raise SystemExit(_run(runtimes, dpu, _urls(host, https_port, http_port), grace))


def _address(host: str, port: int) -> str:
    """`host:port`, or `off` for port 0."""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port}" if port else "off"


def _urls(host: str, https_port: int, http_port: int) -> tuple[str, str]:
    """Base URLs, empty for a port that is off."""
    https, http = _address(host, https_port), _address(host, http_port)
    return f"https://{https}" if https_port else "", f"http://{http}" if http_port else ""


def _run(runtimes: list[Runtime], dpu: list[str], urls: tuple[str, str], grace: float) -> int:
    signals = StopSignals()
    programs: list[Program] = []
    try:
        for number, runtime in enumerate(runtimes):
            programs.append(runtime.start(f"blink-gpu {number}" if len(runtimes) > 1 else "blink-gpu"))
        programs.append(Program.start("blink-dpu", "dpu_service.main", dpu))
        if wait_ready(programs, signals, START_SECONDS):
            control = runtimes[0].control
            with ControlClient(Dial(control)) as client:
                served = plain(client.list_models()[0].name)
            others = [runtime.control for runtime in runtimes[1:]]
            print(usage_text(served, *urls, control, others, guarded="--api-keys" in dpu), flush=True)
        ended = _wait_end(programs, signals)
    except StartError as error:
        console.print(str(error), style="red")
        return 1
    finally:
        if signals.count:
            console.print("stopping: running requests may finish; once more to stop at once")
        # Front end first, so that running requests finish.
        stop_all(programs[::-1], signals, grace + 5)
    if ended is None:
        return 0
    console.print(f"{ended.name} ended with status {ended.process.returncode}; stopped", style="red")
    return 1


def _wait_end(programs: list[Program], signals: StopSignals) -> Program | None:
    """Until a signal (None), or the end of the front end, which is the last one, or of the last runtime."""
    running = list(programs)
    while True:
        ended = wait_first_end(running, signals)
        if ended is None or ended is programs[-1] or len(running) == 2:
            return ended
        running.remove(ended)
        console.print(f"{ended.name} ended with status {ended.process.returncode}; the others serve on", style="red")


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
