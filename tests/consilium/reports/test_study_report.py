"""Tests the report: it is complete, states no ε alone, fetches nothing, and draws patients in the right orientation."""

from __future__ import annotations

import html
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.case_pictures import OUTLINES, centre_of, draw_planes
from common.errors import InvalidInput
from common.ledger.charges import Spend
from common.ledger.spending import Spending
from common.measured_gain import ONE_RUN, Score
from common.plain import RESEARCH_ONLY
from common.planes import PLANES
from common.privacy.accounting import max_mu_squared
from common.privacy.consent import guess_right_at_most
from common.privacy.figures import percent_text
from common.privacy.mechanism import Budget, Relation, Unit
from consilium.demo.evaluate import shown_cases
from consilium.reports.certificate import in_words
from consilium.reports.report_pictures import Picture
from consilium.reports.study_report import CONTROLS_NOTE, render_html, write_report
from tests.report_facts import make_facts

pytestmark = pytest.mark.slow

NAN = math.nan


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(make_facts())


class Outline(HTMLParser):
    """Collects the tags, attributes and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in ("style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "title")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


# ---- report.json -----------------------------------------------------------------------------------------------------


def test_json_has_the_promised_keys(tmp_path: Path) -> None:
    write_report(tmp_path / "new" / "dir", make_facts())
    report = json.loads((tmp_path / "new" / "dir" / "report.json").read_text(encoding="utf-8"))
    assert report["schema"] == 1
    assert report["student"]["dice"] == {"mean": 0.648, "per_class": {"anterior": 0.661, "posterior": 0.635}}
    assert report["teachers"][1]["name"] == "hospital-2"
    assert report["teachers"][1]["dice"]["mean"] == pytest.approx(0.83)
    assert report["ensemble"]["dice"]["mean"] == 0.862
    assert report["mean_shape"]["dice"]["per_class"]["posterior"] == 0.590
    assert report["decoded_labels"]["dice"]["mean"] == 0.631
    assert list(report["controls"]) == ["zero_code", "shuffled_codes", "public_only"]
    assert report["controls"]["shuffled_codes"]["dice"] == {
        "mean": 0.6,
        "per_class": {"anterior": 0.608, "posterior": 0.592},
    }
    privacy = report["privacy"]
    assert privacy["epsilon_exact"] == pytest.approx(8.0, abs=1e-4)
    assert privacy["epsilon_rdp"] == pytest.approx(8.8726, abs=1e-3)
    assert privacy["delta"] == 1e-3
    assert (privacy["unit"], privacy["relation"], privacy["queries"]) == ("hospital", "replace-one", 80)
    assert privacy["noise_multiplier"] == pytest.approx(0.480014 * math.sqrt(80))
    assert report["daemons"][0] == {"role": "superlink", "pid": 41201}
    assert report["sites"][3]["name"] == "hospital-4"
    assert report["sites"][3]["codes_sent"] == 80
    assert report["seconds"]["teachers"] == 187.4
    assert report["ledger"]["rows"] == 86
    assert sorted(path.name for path in (tmp_path / "new" / "dir").iterdir()) == ["report.html", "report.json"]


def test_a_figure_that_is_not_a_number_is_null_in_json_and_a_dash_on_the_page(tmp_path: Path) -> None:
    facts = replace(make_facts(pictures=0), student=Score((NAN, 0.5), NAN), seconds={"collect": math.inf})
    facts = replace(facts, decoded_labels=None)
    write_report(tmp_path, facts)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert report["student"]["dice"] == {"mean": None, "per_class": {"anterior": None, "posterior": 0.5}}
    assert report["seconds"]["collect"] is None
    assert report["decoded_labels"]["dice"] is None
    text = Outline((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "nan" not in re.findall(r"[a-z]+", text.lower())


# ---- report.html -----------------------------------------------------------------------------------------------------


def test_page_needs_no_script_and_asks_nothing_of_any_network(page: str) -> None:
    parsed = Outline(page)
    assert not [tag for tag, _ in parsed.tags if tag in ("script", "link", "iframe", "object", "embed", "form", "base")]
    sources = [attrs[key] for _, attrs in parsed.tags for key in ("src", "href", "srcset", "action") if key in attrs]
    assert sources
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|url\(|@import", page)
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on")]


def test_the_page_calls_the_budget_the_guarantee_and_the_spend_spent() -> None:
    facts = make_facts(pictures=0)
    spent = Spend(max_mu_squared("exact", Budget(5.0, 1e-3)))
    facts = replace(facts, spending=Spending.of(facts.study.privacy, spent), queries=40)
    text = re.sub(r"\s+", " ", Outline(render_html(facts)).text)
    assert text.index("The guarantee ε = 8 ") < text.index("ε = 5 spent of planned ε = 8")
    assert re.search("A guess whether a hospital's data .* exchanged", text)
    assert "85.2 %" in text


def test_every_epsilon_stands_with_accountant_delta_unit_and_relation(page: str) -> None:
    text = re.sub(r"\s+", " ", Outline(page).text)
    figures = [match.start() for match in re.finditer(r"ε = ", text)]
    assert len(figures) >= 3
    for start in figures:
        near = text[start : start + 200]
        for word in ("accountant", "δ = 0.001", "unit of privacy: hospital", "neighbouring relation: replace-one"):
            assert word in near, near
    caption = next(part for part in re.findall(r"<caption>(.*?)</caption>", page, re.S) if "pool of patients" in part)
    for word in ("accountant", "0.001", "hospital", "replace-one"):
        assert word in caption


def test_page_says_what_is_not_protected(page: str) -> None:
    text = Outline(page).text
    for promise in (
        "trusted to add the noise",
        "Receipts prove accounting, not noise",
        "volumes are public",
        "figures exist only here",
        "Who took part is not hidden",
    ):
        assert promise in text


def test_page_shows_every_score_site_daemon_and_stage(page: str) -> None:
    facts, text = make_facts(), Outline(page).text
    for score in [teacher.score for teacher in facts.teachers] + [
        facts.student,
        facts.ensemble,
        facts.mean_shape,
        *facts.controls.values(),
    ]:
        assert score is not None
        assert f"{score.mean:.3f}" in text
    for site in facts.sites:
        assert site.pool in text
    for daemon in facts.daemons:
        assert daemon.role in text
        assert str(daemon.pid) in text
    for stage in (*facts.seconds, *facts.run_seconds):
        assert stage in text
    assert facts.refused_node in text
    assert facts.ledger_head in text


def test_page_is_accessible(page: str) -> None:
    parsed = Outline(page)
    names = [tag for tag, _ in parsed.tags]
    assert names.count("h1") == 1
    assert names.count("caption") == names.count("table")
    assert all(attrs.get("alt") for tag, attrs in parsed.tags if tag == "img")
    assert all("scope" in attrs for tag, attrs in parsed.tags if tag == "th")
    assert all(attrs.get("lang") == "en" for tag, attrs in parsed.tags if tag == "html")
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_text_from_outside_is_escaped() -> None:
    facts = make_facts(pictures=1)
    evil = '"><script>alert(1)</script>'
    hostile = replace(
        facts,
        refused_node=evil,
        sites=(replace(facts.sites[0], name=evil, pool=evil),),
        pictures=(replace(facts.pictures[0], title=evil),),
        seconds={evil: 1.0},
        run_seconds={evil: 1.0},
    )
    assert "<script" not in render_html(hostile)


@pytest.mark.slow
def test_a_pictures_outlines_have_the_names_of_the_legend() -> None:
    facts = make_facts(pictures=1)
    (picture,) = facts.pictures
    shown = replace(picture, outlines=dict.fromkeys(OUTLINES, next(iter(picture.outlines.values()))))
    text = Outline(render_html(replace(facts, pictures=(shown,)))).text
    assert "outlines: truth, before any query, all teachers without noise" in re.sub(r"\s+", " ", text)
    assert "nobody asked" not in text


def test_page_with_many_large_noisy_pictures_stays_under_3_mb() -> None:
    rng = np.random.default_rng(0)
    image = rng.standard_normal((96, 96, 96)).astype(np.float32)
    label = np.zeros(image.shape, dtype=np.uint8)
    label[30:60, 30:60, 30:60] = 1
    picture = Picture(title="noise", kind="test", image=image, outlines=dict.fromkeys(OUTLINES, label))
    assert len(render_html(replace(make_facts(), pictures=(picture,) * 8)).encode()) < 3_000_000


@pytest.mark.parametrize(
    ("unit", "relation", "sentence"),
    [
        ("hospital", "replace-one", "data of one hospital"),
        ("hospital", "zero-out", "replaced by zero"),
        ("patient", "replace-one", "one patient's data"),
    ],
)
def test_protection_is_described_for_its_unit_and_relation(unit: str, relation: str, sentence: str) -> None:
    facts = make_facts(pictures=0)
    terms = replace(facts.study.privacy, unit=Unit(unit), relation=Relation(relation))
    facts = replace(facts, study=replace(facts.study, privacy=terms))
    assert sentence in Outline(render_html(facts)).text.replace("\u2019", "'")


def test_the_student_stands_beside_the_mean_shape_without_a_second_verdict() -> None:
    facts = replace(make_facts(pictures=0), student=Score((0.6, 0.6), 0.60))
    text = Outline(render_html(facts)).text
    assert re.search("student .*0.600, the mean shape 0.612", text)
    assert "taught it nothing" not in text
    unscored = replace(facts, controls=dict.fromkeys(facts.controls))
    assert "could not be measured" in Outline(render_html(unscored)).text


def test_the_headline_says_when_most_single_teachers_are_better_and_how_bad_the_worst_case_is() -> None:
    facts = replace(make_facts(pictures=0), student=Score((0.05, 0.05), 0.05, cases=(0.01, 0.05, 0.09)))
    text = Outline(render_html(facts)).text
    count = len(facts.teachers)
    assert f"{count} of the {count} single teachers" in text
    assert re.search("0.010 on the worst of 3 .*median is 0.050", text)
    best = replace(facts, student=Score((0.999, 0.999), 0.999))
    assert not re.search("[0-9] single teachers", Outline(render_html(best)).text)


def test_the_page_is_marked_as_research(page: str) -> None:
    assert RESEARCH_ONLY in page


def test_the_page_begins_with_what_was_gained_then_pictures_then_the_guarantee() -> None:
    page = render_html(make_facts(pictures=1))
    headings = re.findall(r"<h2[^>]*>([^<]+)</h2>", page)
    assert headings[:3] == ["What was gained", "Pictures", "The guarantee"]
    chart = page.split('<figure class="gain"')[1].split("</figure>")[0]
    shown = [name for name in ("Student", "Zero code", "Mean teacher", "Mean shape") if f"<span>{name}</span>" in chart]
    assert shown == ["Student", "Zero code", "Mean teacher", "Mean shape"]
    before_guarantee = page.split("guarantee-title")[0]
    assert re.search("not proven over .*shuffled codes", before_guarantee)
    assert page.count("<details") == page.count("</details>")


def test_the_chart_of_the_gain_is_not_drawn_on_the_dark_ground_of_pictures(page: str) -> None:
    """The chart's letters have the page's own colour."""
    assert "figure.gain { background: none;" in page
    assert page.index("figure { margin: 0; background: #") < page.index("figure.gain { background: none;")


def test_page_says_that_the_gain_over_the_controls_counts(page: str) -> None:
    text = Outline(page).text
    assert CONTROLS_NOTE in text
    assert re.search(r"not proven over .*shuffled codes: \+0\.048 Dice", text)
    assert "no interval" in text


def test_a_student_no_better_than_a_control_is_said_to_be_so_however_good_it_is() -> None:
    facts = make_facts(pictures=0)
    facts = replace(facts, controls={**facts.controls, "zero_code": Score((0.66, 0.66), 0.66)})
    text = Outline(render_html(facts)).text
    assert re.search(r"not proven over .*zero code: -0\.012 Dice", text)


def test_the_page_says_what_the_interval_covers_or_that_there_is_no_interval() -> None:
    facts = make_facts(pictures=0)
    assert "no interval." in Outline(render_html(facts)).text

    def page(*cases: float) -> str:
        zero = replace(facts.controls["shuffled_codes"] or facts.student, cases=(0.6, 0.6, 0.6))
        paired = replace(facts, student=replace(facts.student, cases=cases))
        alone = dict.fromkeys(facts.controls) | {"shuffled_codes": zero}
        return Outline(render_html(replace(paired, controls=alone))).text

    # paired differences .04, .05, .06: mean .05, s .01, t(2) = 4.303, so .05 ± 4.303 · .01 / √3
    text = page(0.64, 0.65, 0.66)
    assert re.search(r"95 % interval \+0\.025 to \+0\.075, .*3 cases\)", text)
    assert ONE_RUN in text
    assert "no interval" not in text
    assert re.search("Gain proven over .*shuffled codes", text)
    wide = page(0.5, 0.65, 0.8)
    assert re.search("not proven over .*shuffled codes", wide)
    assert "holds 0" not in wide
    assert "paired over 2 cases" in page(math.nan, 0.65, 0.66)
    assert "no interval." in page(math.nan, math.nan, 0.66)


def test_a_network_that_serves_as_two_controls_is_shown_once_with_both_names() -> None:
    """In a joint study without public pairs ``public_only`` is the network of ``zero_code``."""
    facts = make_facts()
    one = facts.controls["zero_code"]
    codec, privacy = replace(facts.study.codec, joint=True), replace(facts.study.privacy, planned_queries=4)
    joint = replace(facts.study, codec=codec, privacy=privacy)
    both = replace(facts, study=joint, controls={**facts.controls, "public_only": one})
    page = Outline(render_html(both)).text
    assert page.count("Zero code, public only") == 2, "in the chart and in the table"
    assert "one network is both" in page
    assert "Public only" not in page
    apart = Outline(render_html(facts)).text
    assert "Zero code, public only" not in apart
    assert apart.count("Public only") == 2


def test_a_control_that_was_not_trained_is_null_in_json_and_a_reason_on_the_page(tmp_path: Path) -> None:
    facts = make_facts(pictures=0)
    write_report(tmp_path, replace(facts, controls={**facts.controls, "shuffled_codes": None}))
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["controls"]["shuffled_codes"] == {"dice": None}
    assert "two labelled volumes" in Outline((tmp_path / "report.html").read_text(encoding="utf-8")).text


def test_controls_of_another_name_are_refused() -> None:
    facts = make_facts(pictures=0)
    with pytest.raises(InvalidInput):
        replace(facts, controls={**facts.controls, "other": None})


def test_page_claims_no_refusal_it_has_not_seen() -> None:
    text = Outline(render_html(replace(make_facts(pictures=0), refused_node=""))).text
    assert "was refused" not in text
    assert "no unregistered node" in text


def test_the_table_says_over_what_its_mean_is_and_how_the_gain_in_the_text_differs() -> None:
    text = Outline(render_html(make_facts(pictures=0))).text
    assert "Mean over structures" in text
    assert "the gain in the text is a mean over cases" in text


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_a_duration_that_is_not_known_is_a_dash() -> None:
    text = render_html(replace(make_facts(pictures=0), seconds={"data": NAN, "study run": 3725.0}))
    assert '<td class="n">–</td>' in text
    assert "1 h 2 min" in text


def test_report_and_certificate_state_the_same_odds_of_a_guess() -> None:
    facts = make_facts(pictures=0)
    privacy, spent = facts.study.privacy, facts.spending.mu_squared
    limit = max_mu_squared(privacy.accountant, privacy.budget)
    of_the_certificate = in_words(facts.spending, colluders=None)[1]
    said = html.unescape(render_html(facts))
    whole, so_far = re.findall(r"A guess.*?except the noise\.|After.*? of the time\.", of_the_certificate)
    assert whole in said
    assert so_far.strip() in said
    assert percent_text(guess_right_at_most(spent)) in so_far
    assert percent_text(guess_right_at_most(limit)) in whole


def test_stages_within_the_studys_run_are_not_counted_twice() -> None:
    facts = replace(make_facts(pictures=0), seconds={"data": 12.0, "study run": 120.0}, run_seconds={"collect": 63.0})
    text = render_html(facts)
    assert "2 min 12 s" in text
    assert "3 min 15 s" not in text
    assert "run: collect" in html.unescape(text)


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "voxel", "side"),
    [
        # RAS+: the highest index along x is right, along y anterior, along z superior.
        ("axial", (9, 5, 5), "left"),  # the patient's right
        ("axial", (5, 9, 5), "top"),  # anterior
        ("coronal", (9, 5, 5), "left"),
        ("coronal", (5, 5, 9), "top"),  # superior
        ("sagittal", (5, 9, 5), "left"),  # anterior
        ("sagittal", (5, 5, 9), "top"),
    ],
)
def test_planes_are_shown_as_radiologists_read_them(view: str, voxel: tuple[int, int, int], side: str) -> None:
    volume = np.zeros((11, 11, 11), dtype=np.uint8)
    volume[voxel] = 1
    shown = PLANES[view].cut(volume, 5)  # [row from the bottom, column from the left]
    row, column = np.argwhere(shown)[0]
    assert {"left": column < 5, "top": row > 5}[side]
    letters = dict(zip(("left", "right", "top", "bottom"), PLANES[view].letters, strict=True))
    axis = int(np.argmax(np.abs(np.array(voxel) - 5)))
    assert letters[side] == "RAS"[axis]


def test_planes_go_through_the_label_even_when_its_centre_is_hollow() -> None:
    label = np.zeros((20, 20, 20), dtype=np.uint8)
    label[4:6, 10, 10] = label[14:17, 10, 10] = 1
    x, y, z = centre_of(np.zeros(label.shape, np.float32), {"truth": label})
    assert label[x].any()
    assert (y, z) == (10, 10)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (1.0, 1.0, 4.0)])
def test_planes_keep_the_proportions_of_the_body(spacing: tuple[float, float, float]) -> None:
    """A ball in millimetres is drawn round for every voxel spacing."""
    size_mm = 64.0
    grid = tuple(int(size_mm / s) for s in spacing)
    axes = [(np.arange(n) + 0.5) * s - size_mm / 2 for n, s in zip(grid, spacing, strict=True)]
    x, y, z = np.meshgrid(*axes, indexing="ij")
    ball = (x**2 + y**2 + z**2 < 24.0**2).astype(np.uint8)
    drawn = draw_planes(np.zeros(grid, np.float32), {"student": ball}, spacing)
    pixels = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB")).astype(int)
    orange = (pixels[..., 0] > 180) & (pixels[..., 1] > 90) & (pixels[..., 2] < 90)
    thirds = np.array_split(np.arange(pixels.shape[1]), 3)
    for columns in thirds:
        rows, across = np.nonzero(orange[:, columns])
        # One voxel of 4 mm is 8 % of the ball.
        assert np.ptp(rows) == pytest.approx(np.ptp(across), rel=0.03 if spacing[2] == 1 else 0.12)


def test_a_picture_without_labels_or_contrast_is_still_drawn() -> None:
    empty = np.zeros((8, 8, 8), dtype=np.uint8)
    drawn = draw_planes(np.zeros((8, 8, 8), np.float32), {"truth": empty}, (1.0, 1.0, 1.0), title="empty")
    assert drawn.startswith(b"\x89PNG")


def test_the_labels_of_one_map_can_be_told_apart() -> None:
    label = np.zeros((32, 32, 32), np.uint8)
    label[4:14, 8:24, 8:24], label[18:28, 8:24, 8:24] = 1, 2

    def pink(*, by_label: bool) -> int:
        drawn = draw_planes(np.zeros(label.shape, np.float32), {"truth": label}, (1, 1, 1), by_label=by_label)
        red, green, _ = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB")).astype(int).transpose(2, 0, 1)
        return int((red - green > 40).sum())

    assert pink(by_label=False) == 0
    assert pink(by_label=True) > 100, "the second label has the second style"


def test_the_outlines_differ_in_colour_and_in_dashes() -> None:
    assert len({style.colour for style in OUTLINES.values()}) == len(OUTLINES)
    assert len({style.dashes for style in OUTLINES.values()}) == len(OUTLINES)


def test_the_truth_is_told_from_the_student_without_colours() -> None:
    """On a grey image the truth's line has pixels near black and near white; the student's line has neither."""
    x, y, z = np.meshgrid(*[np.arange(64) - 31.5] * 3, indexing="ij")
    ball = (x**2 + y**2 + z**2 < 20.0**2).astype(np.uint8)
    grey = np.tile(np.linspace(-1, 1, 64, dtype=np.float32), (64, 64, 1))

    def shades(name: str) -> tuple[int, int]:
        drawn = np.asarray(Image.open(io.BytesIO(draw_planes(grey, {name: ball}, (1, 1, 1)))).convert("L")).astype(int)
        plain = np.asarray(Image.open(io.BytesIO(draw_planes(grey, {}, (1, 1, 1)))).convert("L")).astype(int)
        line = np.abs(drawn - plain) > 12
        return int((drawn[line] > 235).sum()), int((drawn[line] < 15).sum())

    assert min(shades("truth")) > 300
    assert shades("student")[0] < 100


def test_every_test_case_is_listed_the_worst_first(page: str, tmp_path: Path) -> None:
    names = re.findall(r"<th scope=\"row\">(case_\d+)</th><td class=\"n\">([\d.]+)</td>", page)
    assert [float(dice) for _, dice in names] == sorted(float(dice) for _, dice in names)
    assert len(names) == 12
    write_report(tmp_path, make_facts(pictures=0))
    listed = json.loads((tmp_path / "report.json").read_text())["test_cases"]
    assert [one["case"] for one in listed] == [name for name, _ in names]
    assert listed[0]["per_class"] == {"anterior": 0.7, "posterior": pytest.approx(0.3)}


def test_the_best_median_and_worst_case_are_shown() -> None:
    assert shown_cases([0.7, 0.2, 0.9, 0.8, NAN]) == {"best": 2, "median": 0, "worst": 1}
    assert shown_cases([0.4, 0.5]) == {"best": 1, "worst": 0}
    assert shown_cases([NAN]) == {}


def test_the_report_says_who_took_part_in_which_release(tmp_path):
    facts = make_facts()
    write_report(tmp_path, facts)
    releases = json.loads((tmp_path / "report.json").read_text())["releases"]
    assert [(release["queries"], "hospital-1" in release["roster"]) for release in releases] == [
        (20, True),
        (20, True),
        (20, False),
        (20, True),
    ]
    page = (tmp_path / "report.html").read_text()
    table = page[page.index("Who took part in which release") :].split("</table>")[0]
    assert re.findall(r'class="n">(\S+ \(\d+\))<', table) == ["1–2 (40)", "3 (20)", "4 (20)"]
    row = table[table.index(">hospital-1<") :].split("</tr>")[0]
    assert re.findall(r">(yes|no)<", row) == ["yes", "no", "yes"]
