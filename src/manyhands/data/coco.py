"""Boxes in COCO's json form, and in the plainer json form of the playing cards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from manyhands.data.archives import Files, open_files, read_text
from manyhands.data.boxes import Annotation, BoxImages, box_array
from manyhands.errors import RequestError


class CocoImage(BaseModel):
    id: int
    file_name: str
    width: int = Field(gt=0)
    height: int = Field(gt=0)


class CocoBox(BaseModel):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]  # left, top, width, height
    iscrowd: int = 0


class CocoCategory(BaseModel):
    id: int
    name: str


class CocoFile(BaseModel):
    """The parts of a COCO file that boxes need; the rest, outlines above all, is not kept."""

    images: list[CocoImage]
    annotations: list[CocoBox]
    categories: list[CocoCategory]


class CardsImage(BaseModel):
    file: str
    width: int = Field(gt=0)
    height: int = Field(gt=0)
    split: str
    boxes: list[tuple[float, float, float, float]]  # x1, y1, x2, y2
    labels: list[int]


class CardsFile(BaseModel):
    classes: list[str]
    images: list[CardsImage]


Schema = TypeVar("Schema", bound=BaseModel)
OTHER_NAMES = {"train": ("train",), "test": ("test", "val", "valid")}


def open_coco(path: Path, split: str) -> BoxImages:
    """The images of a COCO json file, or of a folder, tar or zip with one for each split or one for both.

    Images lie beside the json, in `images/`, in a folder of the split's name, or in one beside that of the
    json, as in COCO itself: `annotations/instances_train2017.json` and `train2017/1.jpg`.
    """
    single = path.suffix == ".json"
    if single and not path.is_file():
        raise RequestError(f"there is no file {path}.")
    files = open_files(path.parent if single else path)
    name = path.name if single else _annotations_name(files, split)
    content = _parsed(files, name, CocoFile)
    categories = sorted(content.categories, key=lambda category: category.id)
    label_of = {category.id: label for label, category in enumerate(categories)}
    boxes: dict[int, list[list[float]]] = {image.id: [] for image in content.images}
    for box in content.annotations:
        if box.image_id not in boxes or box.category_id not in label_of:
            what = f"image {box.image_id}" if box.image_id not in boxes else f"category {box.category_id}"
            raise RequestError(f"{files.where / name} has a box for {what}, which it does not list.")
        left, top, width, height = box.bbox
        if not box.iscrowd:  # a crowd is a region to leave out, not an object
            boxes[box.image_id].append([label_of[box.category_id], left, top, left + width, top + height])
    finder = _Finder(files, name, split)
    annotations = tuple(
        Annotation(finder.find(image.file_name), box_array(boxes[image.id]), (image.height, image.width))
        for image in content.images
    )
    return BoxImages(files, tuple(category.name for category in categories), annotations)


def open_cards(path: Path, split: str) -> BoxImages:
    """The images of one split of a folder, tar or zip whose `annotations.json` names each image's split."""
    files = open_files(path)
    if "annotations.json" not in files.names:
        raise RequestError(f"{path} has no annotations.json.")
    content = _parsed(files, "annotations.json", CardsFile)
    annotations = []
    for image in content.images:
        if len(image.boxes) != len(image.labels):
            raise RequestError(f"{image.file} has {len(image.boxes)} boxes and {len(image.labels)} labels.")
        rows = [[label, *box] for label, box in zip(image.labels, image.boxes, strict=True)]
        if image.split == split:
            annotations.append(Annotation(image.file, box_array(rows), (image.height, image.width)))
    return BoxImages(files, tuple(content.classes), tuple(annotations))


def _annotations_name(files: Files, split: str) -> str:
    """The json of a split, else the one json there is."""
    names = [name for name in files.names if name.endswith(".json") and not _hidden(name)]
    if not names:
        raise RequestError(f"{files.where} has no annotations.json.")
    for word in OTHER_NAMES[split]:
        if found := [name for name in names if word in _words(name)]:
            boxes = [name for name in found if "instances" in _words(name)]  # not captions or key points
            return (boxes or found)[0]
    of_no_split = [name for name in names if not _words(name) & {*OTHER_NAMES["train"], *OTHER_NAMES["test"]}]
    if "annotations.json" in of_no_split or len(of_no_split) == 1:
        return "annotations.json" if "annotations.json" in of_no_split else of_no_split[0]
    raise RequestError(f"{files.where} has no json of the {split} images; it has {', '.join(names[:4])}.")


class _Finder:
    """Where the images of a json lie. The first place that has a file is taken; none: it is missing."""

    def __init__(self, files: Files, json_name: str, split: str) -> None:
        folder = json_name.rpartition("/")[0]
        beside = [folder, f"{folder}/images".strip("/")]
        stem = json_name.rpartition("/")[2].removesuffix(".json").removeprefix("instances_")
        splits = [place for word in (stem, *OTHER_NAMES[split]) for place in (word, f"images/{word}")]
        self.places = [*beside, "", "images", *splits]
        self.names = set(files.names)

    def find(self, file_name: str) -> str:
        options = [f"{place}/{file_name}".lstrip("/") for place in self.places]
        return next((option for option in options if option in self.names), options[0])


def _parsed(files: Files, name: str, schema: type[Schema]) -> Schema:
    try:
        return schema.model_validate_json(read_text(files, name))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{files.where / name}: {f'{place}: ' * bool(place)}{problem['msg']}.") from None


def _words(name: str) -> set[str]:
    """`annotations/instances_train2017.json` has the words annotations, instances, train and json."""
    return set(re.split(r"[^a-z]+", name.lower()))


def _hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")
