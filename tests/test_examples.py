"""Example prompts: their order, their pictures, which one fits a model, and what choosing one sets."""

import json
from pathlib import Path

from PIL import Image

from pages import channels, compare, examples
from pages.examples import example_for, load_examples
from pop_core.scenes import KINDS, held_out_questions, picture
from scripts import example_pictures


def test_examples_are_grouped_by_kind_and_the_first_one_is_of_any_model():
    known = load_examples()
    kinds = [entry["kind"] for entry in known]
    assert len(set(kinds)) == sum(a != b for a, b in zip([None, *kinds], kinds, strict=False))
    assert kinds.count("picture") == 6 and len(kinds) == 18
    assert "model" not in known[0] and "images" not in known[0]


def test_pictures_are_of_held_out_scenes_with_their_questions():
    """What the script would write is what is there: a change of the scenes asks for it to be run again."""
    made = example_pictures.examples()
    assert [entry for entry, _ in made] == [entry for entry in load_examples() if entry["kind"] == "picture"]
    scenes = dict(list(held_out_questions(30)))
    for entry, scene in made:
        assert scene.held_out and any(question.text == entry["prompt"] for question in scenes[scene])
        for name in entry["images"]:
            file = examples.ASSETS / name
            assert file.stat().st_size < 8_000
            with Image.open(file) as drawn:
                assert drawn.size == (384, 384) and drawn.tobytes() == picture(scene).tobytes()
    assert set(example_pictures.CHOSEN) < set(KINDS)


def test_pictures_lie_where_gradio_may_serve_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the app may be started from anywhere
    (path,) = examples.pictures(load_examples()[-1])
    assert Path(path).is_absolute() and not Path(path).is_relative_to(examples.ASSETS)
    assert Path(path).read_bytes() == (examples.ASSETS / load_examples()[-1]["images"][0]).read_bytes()
    assert examples.pictures(load_examples()[0]) is None


def test_a_models_own_examples_are_offered_with_it(tmp_path, monkeypatch):
    known = load_examples()
    folder = tmp_path / "models" / "stories"
    folder.mkdir(parents=True)
    (folder / "examples.json").write_text(json.dumps(["Once upon a time", {"title": "A dog", "prompt": "The dog"}]))
    monkeypatch.setattr(examples, "ASSETS", tmp_path)
    known += examples.examples_of_models()
    common, own = len(known) - 2, [entry["prompt"] for entry in known[-2:]]
    assert own == ["Once upon a time", "The dog"] and known[-1]["title"] == "A dog"
    assert example_for("stories", known[0]["prompt"], known) == common
    assert example_for("smollm2", own[1], known) == 0
    for model, prompt in (("smollm2", known[1]["prompt"]), ("stories", own[1]), ("stories", "typed by a visitor")):
        assert example_for(model, prompt, known) is None


def test_a_model_that_sees_is_offered_a_picture_and_own_pictures_stay():
    known = load_examples()
    first = next(at for at, entry in enumerate(known) if entry["kind"] == "picture")
    shown = known[first]
    theirs = ["/somewhere/describe.png"]
    assert example_for("shapes-vl", known[0]["prompt"], known, None) == first
    assert example_for("smollm2", shown["prompt"], known, theirs) == 0
    assert example_for("shapes-vl", shown["prompt"], known, theirs) is None
    for images in (["/somewhere/holiday.jpg"], None, [*theirs, "/somewhere/holiday.jpg"]):
        assert example_for("smollm2", shown["prompt"], known, images) is None


def test_choosing_an_example_sets_its_pictures_and_asks_for_its_model():
    at = next(at for at, entry in enumerate(compare.EXAMPLES) if entry["kind"] == "picture")
    prompt, images, tokens, model, asked = compare.chosen_example(at, "smollm2")
    assert (prompt, tokens, model) == ("describe the picture.", 32, "shapes-vl") and len(images) == 1
    assert asked.startswith("shapes-vl ") and asked != compare.chosen_example(at, "smollm2")[-1]
    *_, model, asked = compare.chosen_example(at, "shapes-vl")  # it is there already
    assert model == asked and "value" not in model
    prompt, images, *_, model, asked = compare.chosen_example(0, "shapes-vl")
    assert images is None and "value" not in model
    assert compare.fitting_example("shapes-vl", prompt, None)[0] == at
    assert channels.filled(channels.EXAMPLES[at])["images"] and channels.filled(channels.EXAMPLES[0])["images"] is None
