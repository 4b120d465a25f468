"""The evidence page: what is drawn was measured, and what is no measurement is refused with a sentence."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browsers import browser, tab  # noqa: F401 (fixtures)

from minirad.__main__ import main as minirad
from minirad.evidence.ablations import FULL, SETTINGS
from minirad.evidence.paper import LOWER, PAPER
from viz import evidence
from viz.evidence import OfFull

Data = dict[str, Any]


def spread(middle: float) -> Data:
    return {"median": middle, "low": middle * 0.9, "high": middle * 1.2}


def run(*seconds: float, **more: Any) -> Data:
    return {
        "seconds": list(seconds), "programs_per_s": spread(8.0), "tokens_per_s": spread(80.0),
        "ttft_ms": spread(12.0), "latency_s": spread(0.5), "hit_rate": 0.5, "share": 0.75, "batch": 3.0,
        "computed_tokens": 1234, "right": [3, 4], **more,
    }  # fmt: skip


def kind(name: str, **runs: Data) -> Data:
    return {
        "name": name, "title": f"what {name} is", "paper": "P <&> Q", "scaled": "", "jobs": 4, "requests": 9,
        "prompt_tokens": 5000, "kv_tokens": 700, "optimum_hit_rate": 0.6,
        "runs": {name.replace("_", "-"): each for name, each in runs.items()},
    }  # fmt: skip


def said_of(name: str) -> Data:
    paper = PAPER[name]
    return {
        "title": SETTINGS[name].title, "paper_sign": paper.sign, "paper_size": paper.size, "note": paper.note,
    }  # fmt: skip


RESULT: Data = {
    "machine": {
        "processor": "A <chip>", "cores": 2, "threads": 1, "load": 14.2, "python": "3.12", "torch": "2.9",
        "minirad": "0.1", "date": "2026-11-29", "clock": "thread_time_ns",
    },
    "model": "classroom",
    "kinds": [
        # The rounds' own shares: 1/2, 2/5, 3/4 for fcfs, so the median is none of the medians' own.
        kind("lot", full=run(1, 2, 3), fcfs=run(2, 5, 4, hit_rate=0.25, share=0.375, right=[2, 4]),
             no_hint=run(0.5, 1.6, 1.5), neither=run(1, 2, 2.5)),
        kind("bit", full=run(1, 1, 1), fcfs=run(0.9, 1, 1.25, share=None, right=None)),
    ],
    "hit_rate": [
        {"kept": kept, "hit_rate": hits, "tokens_per_s": spread(speed), "ttft_ms": spread(wait),
         "batch": spread(batch)}
        for kept, hits, speed, wait, batch in [(1.0, 0.9, 300.0, 50.0, 6.0), (0.0, 0.0, 100.0, 150.0, 2.0)]
    ],
    "overhead": {
        "tree_seconds": 0.06, "seconds": 10.0, "share": 0.006, "with_commit": 0.01, "hit_rate": 0.0,
        "calls": {f"call{n}": {"count": n, "seconds": 0.002 * n} for n in range(1, 8)},
    },
    "ablations": {name: said_of(name) for name in (FULL, "fcfs", "no-hint", "neither", "random")},
}  # fmt: skip
RESULT["overhead"]["calls"]["call7"]["seconds"] = 0.018  # 0.06 in all


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(RESULT), encoding="utf-8")
    return path


# ---------------------------------------------------------------------- each part switched off


def test_bars_and_whiskers_are_those_of_the_rounds_own_shares() -> None:
    bars = evidence.ablation_bars(RESULT, "fcfs")
    assert list(bars.y) == ["lot", "bit"]
    assert list(bars.x) == pytest.approx([1 / 2, 1.0])
    above, below = bars.error_x.array, bars.error_x.arrayminus
    assert [x + more for x, more in zip(bars.x, above, strict=True)] == pytest.approx([3 / 4, 1 / 0.9])
    assert [x - less for x, less in zip(bars.x, below, strict=True)] == pytest.approx([2 / 5, 1 / 1.25])
    assert not bars.error_x.symmetric


def test_a_sign_is_one_that_every_round_has() -> None:
    signs = {
        name: {kind: share.sign for kind, share in evidence.measured(RESULT, name).items()}
        for name in evidence.switched_off(RESULT)
    }
    assert signs == {
        "fcfs": {"lot": "lower", "bit": "even"}, "no-hint": {"lot": "higher"}, "neither": {"lot": "even"},
    }  # fmt: skip
    assert [OfFull(0.8, 0.9, 1.0).sign, OfFull(1.0, 1.1, 1.2).sign] == ["even", "even"]
    for name, each in signs.items():
        bars = evidence.ablation_bars(RESULT, name)
        looks = list(zip(bars.marker.color, bars.marker.pattern.shape, strict=True))
        assert looks == [evidence.LOOKS[sign] for sign in each.values()]


def test_a_hover_has_hits_the_share_of_the_best_and_right_answers() -> None:
    lot, bit = evidence.ablation_bars(RESULT, "fcfs").customdata
    assert "0.50 of full (0.40 to 0.75), lower" in lot
    assert "hit rate 25.0%, 37.5% of the best possible" in lot and "right: 2 of 4" in lot
    assert "- of the best possible" in bit and "right: not known" in bit


def test_the_papers_range_is_a_band_and_full_a_line() -> None:
    drawn = evidence.ablation_figure(RESULT, "fcfs")
    band, line = drawn.layout.shapes
    assert (band.x0, band.x1) == evidence.paper_range(PAPER["fcfs"].size) == (0.2, 1.0)
    assert line.x0 == line.x1 == 1
    only = evidence.ablation_figure(RESULT, "neither").layout.shapes
    assert [shape.x0 for shape in only] == [1]  # the paper did not measure it
    axes = {evidence.ablation_figure(RESULT, name).layout.xaxis.range for name in ("fcfs", "neither")}
    assert len(axes) == 1 and axes.pop()[1] > 2  # the longest whisker of all


def test_every_size_that_the_paper_has_is_a_range() -> None:
    for name, paper in PAPER.items():
        found = evidence.paper_range(paper.size)
        assert (found is not None) == (paper.sign == LOWER), name
        assert found is None or 0 < found[0] < found[1] <= 1


def test_what_became_of_a_setting_is_said() -> None:
    said = evidence.ours(RESULT, "fcfs")
    assert said == "lower in 1 of 2 kinds; even in bit. From 0.50 (lot) to 1.00 (bit), median 0.75."
    assert "higher in lot" in evidence.ours(RESULT, "no-hint")


# ---------------------------------------------------------------------- hit rate, and what the tree costs


def test_speeds_stand_over_the_hit_rate_in_its_order_with_their_spread() -> None:
    rows = sorted(RESULT["hit_rate"], key=lambda row: row["hit_rate"])
    for line, name in zip(
        evidence.hit_rate_lines(RESULT["hit_rate"]), ("tokens_per_s", "ttft_ms", "batch"), strict=True
    ):
        assert list(line.x) == [0.0, 0.9] and list(line.customdata) == [0.0, 1.0]
        assert list(line.y) == [row[name]["median"] for row in rows]
        ends = zip(line.y, line.error_y.arrayminus, line.error_y.array, strict=True)
        assert [(y - less, y + more) for y, less, more in ends] == [
            pytest.approx((row[name]["low"], row[name]["high"])) for row in rows
        ]


def test_the_trees_calls_add_up_to_its_share() -> None:
    *here, paper = evidence.cost_bars(RESULT["overhead"])
    assert sum(bar.x[0] for bar in here) == pytest.approx(0.006)
    assert [bar.name for bar in here][:2] == ["call7", "call6"] and here[-1].name == "other calls"
    assert paper.x[0] == pytest.approx(0.2 / 74.3) and paper.y != here[0].y
    (alone, _) = evidence.cost_bars({"tree_seconds": 0.06, "seconds": 10.0, "share": 0.006})
    assert alone.x[0] == pytest.approx(0.006)


# ---------------------------------------------------------------------- the page


def words(text: str) -> str:
    """What a page says, without its charts."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_the_page_needs_no_network_and_says_it_all(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert evidence.main([str(file), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text) and "A <chip>" not in text
    said = words(text)
    assert "on A <chip>, 2 cores, 1 of them used, under a load average of 14.2 before it began (more" in said
    assert "Measured on 2026-11-29 with the model classroom" in said and "Python 3.12, torch 2.9" in said
    assert "Whiskers: 3 rounds" in said
    for name in evidence.switched_off(RESULT):
        paper = RESULT["ablations"][name]
        assert f"{name}: {paper['title']}" in said and paper["paper_size"] in said and paper["note"] in said
    assert "random:" not in said  # nothing was run with it
    assert "0.060 of 10.00 s were spent in calls of the tree: 0.60%" in said
    assert "throughput (new tokens/s) from 100 to 300" in said
    assert "lot fcfs 0.50 0.40 to 0.75" in said and "P <&> Q" in said


def test_a_quiet_machine_and_one_round_are_said_too() -> None:
    quiet = copy.deepcopy(RESULT)
    quiet["machine"] |= {"load": 0.3, "clock": "perf_counter_ns", "gpu": "A card"}
    for each in quiet["kinds"]:
        for one in each["runs"].values():
            one["seconds"] = one["seconds"][:1]
    said = words(evidence.page(quiet))
    assert "on A card" in said and "load average of 0.3 before it began. Python" in said
    assert "clock on the wall" in evidence.about(quiet) and "in one round" in said
    quiet["machine"]["load"] = None
    assert "an unknown load" in evidence.about(quiet)


def test_without_a_sweep_the_rest_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(RESULT | {"hit_rate": None, "overhead": None}), encoding="utf-8")
    said = words(evidence.page(evidence.read(path)))
    assert said.count("Not measured in this run: bench programs --sweep does") == 2
    assert "lot fcfs 0.50" in said


def test_a_file_with_nothing_switched_off_still_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "full.json"
    kinds = [kind("lot", full=run(1, 2, 3))]
    path.write_text(json.dumps(RESULT | {"kinds": kinds}), encoding="utf-8")
    assert "lot full 1.00" in words(evidence.page(evidence.read(path)))


def test_what_the_bench_writes_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    what = ["--kinds", "mmlu-like", "--settings", "no-cache", "--jobs", "1", "--reps", "1"]
    assert minirad(["bench", "programs", *what, "--out", str(path)]) == 0
    result = evidence.read(path)
    assert evidence.switched_off(result) == ["no-cache"] and "mmlu-like" in evidence.page(result)


def test_the_measurement_that_is_shipped_is_whole() -> None:
    result = evidence.read(evidence.MEASURED)
    assert set(evidence.switched_off(result)) == set(SETTINGS) - {FULL}
    assert result["hit_rate"] and result["overhead"]
    said = words(evidence.page(result))
    assert all(each["name"] in said for each in result["kinds"])


# ---------------------------------------------------------------------- what is no measurement


def broken(change: Callable[[Data], Any]) -> bytes:
    result = copy.deepcopy(RESULT)
    change(result)
    return json.dumps(result).encode()


def lot(result: Data) -> Data:
    return result["kinds"][0]["runs"]["fcfs"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "has no list 'kinds'"),
        (b'{"roofline": []}', "has no list 'kinds'"),
        (broken(lambda it: it.update(kinds=[])), r"kinds must be a list .*, got \[\]"),
        (broken(lambda it: it.update(kinds=[7])), r"kinds\[0\] must be an object .*, got 7"),
        (broken(lambda it: it.pop("machine")), "machine is missing"),
        (broken(lambda it: it.pop("overhead")), "overhead is missing"),
        (broken(lambda it: it["machine"].update(load="x")), r"machine\.load must be a number.*, got 'x'"),
        (broken(lambda it: lot(it).update(seconds=[1, 0, 2])), r"seconds\[1\] must be .* above 0, got 0"),
        (broken(lambda it: lot(it).update(seconds=[1, 2])), r"fcfs\.seconds has 2 rounds, that of full 3"),
        (broken(lambda it: lot(it).update(hit_rate=float("nan"))), r"hit_rate must be a share .*, got nan"),
        (broken(lambda it: lot(it).update(hit_rate=True)), "hit_rate must be a share .*, got True"),
        (broken(lambda it: lot(it).update(ttft_ms=3)), r"ttft_ms must be an object with low.*, got 3"),
        (broken(lambda it: lot(it)["ttft_ms"].update(low=99)), "ttft_ms must be an object with low"),
        (broken(lambda it: lot(it).update(right=[5, 4])), r"right must be two numbers.*, got \[5, 4\]"),
        (broken(lambda it: it["kinds"][0]["runs"].pop("full")), r"kinds\[0\]\.runs\.full is missing"),
        (broken(lambda it: it["ablations"].pop("fcfs")), r"runs\.fcfs is a setting of which 'ablations'"),
        (broken(lambda it: it["kinds"][1].update(name="lot")), r"kinds\[1\]\.name reads .*'lot'"),
        (broken(lambda it: it["hit_rate"][1].pop("batch")), r"hit_rate\[1\]\.batch is missing"),
        (broken(lambda it: it["overhead"].update(seconds=0)), r"overhead\.seconds must be .*, got 0"),
        (broken(lambda it: it["overhead"].update(calls={})), r"overhead\.calls must be .*, got {}"),
    ],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert evidence.main([str(path), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and "bad.json" in said and said.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_nothing_is_lost_by_a_wrong_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    for name in (str(file), str(file.parent / "none" / "x.html"), str(file.with_suffix(".py"))):
        assert evidence.main([str(file), "--out", name]) == 2
        assert "--out" in capsys.readouterr().err
    assert file.read_bytes() == before and not file.with_suffix(".py").exists()


def test_texts_of_the_file_are_only_text() -> None:
    result = copy.deepcopy(RESULT)
    evil = "</script><script>alert(1)</script>\ud800{x}"
    result["kinds"][0] |= {"name": evil, "title": evil, "paper": evil, "scaled": evil}
    result["ablations"]["fcfs"] |= {"title": evil, "note": evil, "paper_sign": evil, "paper_size": evil}
    result["machine"]["processor"] = result["model"] = evil
    result["overhead"]["calls"] = {evil: {"count": 1, "seconds": 0.1}}
    assert "alert(1)</script>" not in evidence.page(result)


# ---------------------------------------------------------------------- in a browser


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [900, 1280])
def test_the_page_fits_and_draws_every_bar(width: int, tab: Any, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "page.html"
    assert evidence.main(["--out", str(out)]) == 0
    result = evidence.read(evidence.MEASURED)
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(out.as_uri())
    bars = sum(len(evidence.measured(result, name)) for name in evidence.switched_off(result))
    tab.wait_for_function("n => document.querySelectorAll('.pair .bars .point').length === n", arg=bars)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
