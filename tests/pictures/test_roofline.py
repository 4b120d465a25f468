"""The roofline page: drawn from the benchmark's JSON, and refused with a sentence when that is not whole."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

from viz import roofline
from viz.draw.still import still

ROWS = [
    {"batch": 16, "weight_ms": 0.8, "kv_ms": 0.1, "host_ms": 0.2, "step_ms": 1.5, "tokens_per_s": 10000.0},
    {"batch": 1, "weight_ms": 0.8, "kv_ms": 0.0, "host_ms": 0.1, "step_ms": 1.0, "tokens_per_s": 1000.0},
]
RESULT = {
    "machine": {"gpu": "A <card>", "torch": "2", "flashinfer": "0.6"},
    "model": "a shape", "copy_gb_per_s": 3000.0, "roofline": ROWS,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(RESULT), encoding="utf-8")
    return path


def test_the_roof_is_the_time_of_reading_and_nothing_else() -> None:
    assert roofline.roof(ROWS[1]) == pytest.approx(1250)
    assert roofline.roof(ROWS[0]) == pytest.approx(16 / 0.9e-3)


def test_the_bars_of_a_batch_add_up_to_its_step() -> None:
    weights, kv, rest, host = roofline.step_bars(ROWS, ["16", "1"])
    total = [sum(parts) for parts in zip(weights.y, kv.y, rest.y, strict=True)]
    assert total == pytest.approx([1.5, 1.0])
    assert list(host.y) == [0.2, 0.1]


def test_a_step_faster_than_a_copy_has_no_negative_rest() -> None:
    fast = {**ROWS[1], "step_ms": 0.5}
    assert list(roofline.step_bars([fast], ["1"])[2].y) == [0.0]


def test_the_page_needs_no_network_and_holds_every_number(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert roofline.main([str(file), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "<script src" not in text and "cdn" not in text.split("<h1>")[0]
    assert "A &lt;card&gt;" in text and "3000.0 GB/s" in text
    for cell in ("10,000", "17,778", "56%", "1,000", "1,250", "80%"):
        assert f"<td>{cell}</td>" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "no list 'roofline'"),
        (b'{"roofline": []}', "no list 'roofline'"),
        (b'{"roofline": [{"batch": 1}]}', "row 0 of 'roofline' lacks the number 'weight_ms'"),
    ],
)
def test_what_is_not_whole_is_refused(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path: Any = tmp_path / "bad.json"
    path.write_bytes(content)
    assert roofline.main([str(path), "--out", str(tmp_path / "page.html")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_notebooks_chart_stacks_the_same_parts_and_has_a_still() -> None:
    weights, kv, rest = roofline.steps({"roofline": ROWS, "machine": {"gpu": "a card"}, "model": "m"}).data
    for at, row in enumerate(sorted(ROWS, key=lambda row: row["batch"])):
        assert (weights.base[at], kv.base[at]) == (0.0, row["weight_ms"])
        assert rest.base[at] == pytest.approx(row["weight_ms"] + row["kv_ms"])
        assert rest.base[at] + rest.y[at] == pytest.approx(max(row["step_ms"], rest.base[at]))
    picture = Image.open(io.BytesIO(still(roofline.steps({"roofline": ROWS})))).convert("RGB")
    quarter = picture.crop((picture.width // 8, 120, picture.width // 2, picture.height - 90))
    rest_at, weights_at = (
        next(y for y in range(quarter.height)
             if any(quarter.getpixel((x, y)) == ImageColor.getrgb(colour) for x in range(quarter.width)))
        for colour in (roofline.REST, roofline.WEIGHTS)
    )  # fmt: skip
    assert rest_at < weights_at  # the rest lies on top of the weights
