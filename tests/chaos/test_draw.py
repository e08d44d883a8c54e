"""The drawing shows each leader, fault and slot, and is well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.chaos.checker import check
from tests.chaos.draw import draw
from tests.chaos.story import DUPLICATE, Story, key

SVG = "{http://www.w3.org/2000/svg}"


def drawn(story: Story) -> ElementTree.Element:
    history = story.history()
    return ElementTree.fromstring(draw(history, check(history)))


def titles(picture: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in picture.iter(f"{SVG}title")]


def test_leaders_and_faults_bear_their_story_as_a_title() -> None:
    story = Story()
    story.fault("kill", "beat0")
    story.fault("cut", "beat0:ledger", 4)
    found = titles(drawn(story))
    assert any("beat0 leads under epoch 1800000000" in title for title in found)
    assert any("kill" in title and "beat0" in title for title in found)
    assert any("beat0:ledger" in title for title in found)


def test_there_is_a_tick_for_each_slot() -> None:
    story = Story()
    paths = [path.get("d") or "" for path in drawn(story).iter(f"{SVG}path")]
    assert sum(path.count("v8") for path in paths) == check(story.history()).slots


def test_a_violation_is_circled() -> None:
    story = Story()
    assert not list(drawn(story).iter(f"{SVG}circle"))
    story.forget(DUPLICATE)
    (circle,) = drawn(story).iter(f"{SVG}circle")
    assert key(DUPLICATE) in (circle.find(f"{SVG}title").text or "")  # type: ignore[union-attr]


def test_names_of_any_kind_are_escaped() -> None:
    story = Story()
    story.fault("kill", "<beat0> & 'co'")
    drawn(story)
