"""One's own training loop on several devices: `manyhands run examples/own_loop.py --devices 3`.

The lines marked with # * are all that a plain PyTorch loop has to change.
"""

import argparse

import torch
import torch.nn.functional as F

import manyhands  # *
from manyhands.data.idx import fashion_mnist_small
from manyhands.models.small import demo

parser = argparse.ArgumentParser()
parser.add_argument("--feed", default="replicated", choices=["replicated", "source", "local"])
parser.add_argument("--plan", default="auto")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save", default="model.safetensors")
options = parser.parse_args()

torch.manual_seed(0)
model = demo()
optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
pixels, labels, *_ = fashion_mnist_small()
images = torch.from_numpy(pixels).float()[:, None] / 255
targets = torch.from_numpy(labels).long()

hands = manyhands.join()  # *
training = hands.prepare(  # *
    model, optimiser, F.cross_entropy, images[:60], plan=options.plan, feed=options.feed
)
for step in range(options.steps):
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:60]
    if options.feed == "local":  # each device has its own images: here, its part of the same ones
        chosen = chosen[training.samples]
    elif options.feed == "source" and not hands.first:  # only the first device has images
        loss = training.step(None)
        continue
    loss = training.step(images[chosen], targets[chosen])  # *
    if hands.first:
        print(f"step {step}: loss {loss:.4f}", flush=True)
training.save(options.save)  # *
