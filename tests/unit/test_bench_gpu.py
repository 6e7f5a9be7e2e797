"""The parts of the GPU measurements that compute: floors by hand, stamps of made-up steps, gaps, rows, cores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gpu_runtime.model.config import ModelConfig
from gpu_runtime.scheduler import layout
from tests.bench.gpu import floors, peers, stamps
from tests.bench.gpu.__main__ import MODELS, jobs, missing
from tests.bench.gpu.cores import Cores
from tests.bench.gpu.http import rows_of
from tests.bench.gpu.http_load import Wanted
from tests.bench.gpu.rows import Row, from_line, table, to_lines
from tests.gpu.__main__ import Area, read_report, verdict
from tests.gpu.__main__ import table as area_table
from tests.gpu.gaps import gaps_of
from tests.shapes import SHAPES, letters, shape_config, token_prompt, write_folder

LAYER_8B = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
HEAD_8B = 128256 * 4096


def config(name: str) -> ModelConfig:
    return ModelConfig.from_dict(shape_config(name))


def test_weights_of_a_decode_step() -> None:
    """Gigabytes and milliseconds as they are known for these models: 15.0 GB are 3.41 ms at 4.40 TB/s."""
    assert floors.weight_numbers(config("Llama-3.1-8B")) == 32 * LAYER_8B + 4096 + HEAD_8B
    for name, milliseconds in (("Llama-3.1-8B", 3.41), ("Llama-3.2-1B", 0.56), ("SmolLM2-135M", 0.061)):
        floor = floors.decode_floor(config(name), 1, 0)
        assert floor.seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_keys_and_values_of_a_decode_step() -> None:
    """64 sequences of 1,024 positions: 32 layers, keys and values, 8 heads of 128 numbers, 2 bytes each."""
    alone, crowd = (floors.decode_floor(config("Llama-3.1-8B"), count, 1024).bytes for count in (1, 64))
    assert crowd - alone == 63 * 1024 * 32 * 2 * 8 * 128 * 2


def test_operations_of_a_prefill() -> None:
    """2,048 tokens: two operations a weight and token, and four for each pair of query and key that attention sees."""
    floor = floors.prefill_floor(config("Llama-3.1-8B"), 2048)
    pairs = 2048 * 2049 // 2
    attention = pairs * 4 * 128 * 32 * 32
    assert floor.operations == 2 * 2048 * (32 * LAYER_8B + 4096) + 2 * HEAD_8B + attention
    assert floor.seconds == pytest.approx(37.58e-3, rel=1e-3)


def test_a_short_prefill_is_bound_by_its_bytes() -> None:
    floor = floors.prefill_floor(config("Llama-3.1-8B"), 16)
    assert floor.seconds == pytest.approx(floor.bytes / 4.40e12)


def made_stamps(*steps: tuple[int, int, int, int]) -> np.ndarray:
    """Steps of (number, begin in µs, tokens, decodes); 5 µs before the next 100 µs the scheduler takes 3 µs."""
    found = np.zeros(len(steps), layout.StepStamp)
    for stamp, (number, begin, tokens, decodes) in zip(found, steps, strict=True):
        stamp["step"], stamp["begin_ns"], stamp["tokens"], stamp["decode_works"] = number, begin * 1000, tokens, decodes
        stamp["tail_begin_ns"], stamp["tail_end_ns"] = (begin + 95) * 1000, (begin + 98) * 1000
    return found


def test_decode_steps() -> None:
    """Only pairs of neighbouring steps in which all decode: 1-2 and 2-3, not 3-4 (prefill) and not 5-7 (a gap)."""
    made = made_stamps((1, 0, 8, 8), (2, 100, 8, 8), (3, 200, 8, 8), (4, 300, 40, 8), (5, 400, 8, 8), (7, 900, 8, 8))
    times = stamps.decode_steps(made, 8)
    assert times is not None
    assert (times.count, times.step_p50, times.step_p99) == (2, 100e-6, 100e-6)
    assert (times.scheduler, times.between) == pytest.approx((3e-6, 2e-6))
    assert stamps.decode_steps(made, 7) is None
    assert stamps.decode_steps(made[:0], 8) is None


def test_prefill_steps_and_marks() -> None:
    made = made_stamps((1, 0, 512, 0), (2, 100, 1, 1), (3, 200, 512, 0), (4, 300, 512, 2))
    assert stamps.prefill_steps(made, 512).tolist() == pytest.approx([98e-6, 98e-6])
    assert stamps.last_step(made) == 4
    assert stamps.after(made, 2)["step"].tolist() == [3, 4]
    assert stamps.last_step(made[:0]) == 0


def test_middle_mean() -> None:
    """Outliers on both sides do not count."""
    assert stamps.middle_mean(np.array([1000.0, 2.0, 3.0, 0.0])) == 2.5
    assert stamps.middle_mean(np.array([7.0])) == 7.0


def test_gaps_stay_within_a_stream() -> None:
    sequences = np.array([1, 2, 1, 2, 1], np.uint64)
    times = np.array([0.0, 1.0, 2.0, 4.0, 7.0])
    assert sorted(gaps_of(sequences, times).tolist()) == [2.0, 3.0, 5.0]


def test_rows() -> None:
    """Survive the way between processes; the table shows what is worse and what failed."""
    rows = [
        Row("steps", "m", "decode", 2.0, 2.5, floor=1.0, peers={"vLLM": 4.0, "SGLang": 3.0}),
        Row("http", "m", "first token", 10.0, 60.0, peers={"vLLM": 50.0}, judged_by_p99=True),
        Row("steps", "m", "scheduler", 8.0, unit="µs", target=10.0),
        Row("http", "m", "", error="skipped: no packages"),
    ]
    assert [from_line(line) for line in to_lines(rows).splitlines()] == rows
    assert [row.verdict for row in rows] == ["1.50x", "WORSE 0.83x", "1.25x", ""]
    shown = table(rows).splitlines()
    assert len(shown) == 2 + len(rows)
    assert "2.00x" in shown[2]
    assert "skipped: no packages" in shown[-1]


def test_peers() -> None:
    assert peers.tpot("Llama-3.1-8B", 64, busy=True) == {"vLLM": 9.85, "SGLang": 8.99}
    assert peers.tpot("Llama-3.2-1B", 8) == {"vLLM": 2.98}
    assert peers.tpot("tiny", 1) == {}
    assert peers.open_loop("Llama-3.1-8B", 16.0, "ttft", busy=True) == {"vLLM": 260.0, "SGLang": 89.0}
    assert peers.open_loop("Llama-3.1-8B", 4.0, "ttft", busy=True) == {}


def test_rows_of_a_load() -> None:
    """Milliseconds, beside the peers' figures for the same load."""
    times = {"p50": 0.005, "p99": 0.040}
    figures = {"ttft": times, "tpot": times, "gap": times}
    closed = list(rows_of("Llama-3.1-8B", Wanted(512, 128, streams=64), True, figures))
    assert [row.peers for row in closed] == [{}, {"vLLM": 9.85, "SGLang": 8.99}]
    opened = list(rows_of("Llama-3.1-8B", Wanted(512, 128, rate=16.0), False, figures))
    assert [(row.value, row.p99) for row in opened] == [(5.0, 40.0)] * 3
    assert [row.verdict for row in opened] == ["1.18x", "", "WORSE 0.65x"]


@pytest.mark.parametrize(("count", "sizes"), [(16, (4, 4, 8)), (12, (4, 4, 4)), (11, (11, 11, 11)), (2, (2, 2, 2))])
def test_cores(count: int, sizes: tuple[int, int, int]) -> None:
    cores = Cores.split(range(count))
    groups = (cores.front_end, cores.client, cores.rest)
    assert tuple(map(len, groups)) == sizes
    assert cores.apart == (count >= 12)
    if cores.apart:
        assert len(frozenset().union(*groups)) == count


def test_jobs() -> None:
    """One process for the steps of each model, whatever is asked of it; kernels in theirs."""
    made = jobs(["prefill", "http", "skinny"], MODELS, "cuda")
    assert [(job.part, job.model) for job in made] == [
        *(("steps", model) for model in MODELS),
        *(("http", model) for model in MODELS),
        ("skinny", ""),
    ]
    assert made[0].command[-1] == "prefill"
    assert missing(made[0], "cpu") == ""


def test_shapes_are_models(tmp_path: Path) -> None:
    """A folder that the runtime takes, whose tokenizer makes one token of a letter."""
    from tokenizers import Tokenizer

    from gpu_runtime.model.source import open_folder

    folder = open_folder(write_folder(tmp_path / "m", "SmolLM2-135M"), "m", weights=False)
    assert folder.parameters == pytest.approx(134.5e6, rel=0.001)
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    text = next(letters(100, 1))
    assert len(tokenizer.encode(text).ids) == 100
    prompt = token_prompt(50, SHAPES["SmolLM2-135M"]["vocab_size"], 1)
    assert len(prompt) == 50
    assert min(prompt) >= 3


def test_report_of_a_test_file(tmp_path: Path) -> None:
    """Outcomes and reasons out of pytest's own report, as the final table shows them."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="assert 1 == 2"/></testcase>'
        '<testcase name="c"><skipped message="no GPU"/></testcase><testcase name="d"><skipped message="no GPU"/>'
        "</testcase><testcase><skipped message=\"collection skipped\">('f.py', 3, 'Skipped: no triton')</skipped>"
        "</testcase></testsuite></testsuites>"
    )
    area = Area(Path("test_x.py"), "about x")
    read_report(area, report)
    assert area.outcomes == Counter(passed=1, failed=1, skipped=3)
    assert area.notes == ["FAILED b: assert 1 == 2", "skipped: no GPU (2 tests)", "skipped: no triton"]
    assert verdict(area.outcomes) == "FAILED"
    assert "about x" in area_table([area], 1.0)
