"""A picture of what a trained detector finds: test images with boxes, on one sheet."""

from __future__ import annotations

from pathlib import Path

import torch

from manyhands.data.batches import Loader
from manyhands.detection.pictures import contact_sheet, draw, to_picture
from manyhands.detection.region import detect
from manyhands.training import checkpoints, preparing
from manyhands.training.jobs import Job
from manyhands.training.preparing import Facts

NUM_IMAGES = 16
SURE = 0.2  # what is less sure than this is not drawn


def detection_sheet(job: Job, facts: Facts, device: str) -> Path:
    """Where the sheet was written: beside the checkpoints of the job."""
    model = preparing.build_model(job, facts).float()
    model.load_state_dict(dict(checkpoints.load_model_file(Path(job.save or "")).tensors))
    _, test = preparing.datasets(job, device)
    assert test is not None
    pictures = []
    recipe = preparing.recipe(job, training=False)
    with Loader(test, recipe, 1, 0, False, training=False) as loader, torch.no_grad():
        for number in range(min(NUM_IMAGES, len(test))):
            images, _ = loader.take(number)
            (found,) = detect(model.eval()(images), facts.anchors, len(facts.class_names) or 1, SURE)
            picture = to_picture(_shown(images[0], recipe.mean, recipe.std))
            pictures.append(draw(picture, found.boxes, found.labels, found.scores, facts.class_names))
    path = Path(job.folder or ".") / "detections.png"
    contact_sheet(pictures).save(path)
    return path


def _shown(image: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """The image as it was before it was normalised."""
    return image * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
