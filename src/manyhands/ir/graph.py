"""What to compute: layers in topological order, each with one closed kind of operation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from manyhands.ir.geometry import Shape

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
ITEM_BYTES |= {"int16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Slide:
    """How a window slides along one axis; padding lies before the image's first and after its last row."""

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Rows from the first to the last that one window touches."""
        return self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True, slots=True)
class Window:
    rows: Slide
    columns: Slide


class Statistic(Enum):
    """What a layer must know of its whole input before it can work on a piece of it."""

    BATCH_NORM = "batch norm"  # mean and variance of each channel over batch and map
    GROUP_NORM = "group norm"  # mean and variance of each sample's groups of channels
    MEAN = "mean"  # mean of each sample's channel over the map


class Mode(Enum):
    MAX = "max"
    AVERAGE = "average"
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    CONSTANT = "constant"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch: every device reads its own tile of it."""

    position: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A parameter or buffer used directly in forward, such as a learned scale."""


@dataclass(frozen=True, slots=True)
class Convolve:
    window: Window
    groups: int
    mode: Mode = Mode.CONSTANT

    @property
    def is_product(self) -> bool:
        """1x1 and without a stride: a product of matrices."""
        return all(slide.kernel == slide.stride == 1 for slide in (self.window.rows, self.window.columns))


@dataclass(frozen=True, slots=True)
class Deconvolve:
    """Transposed convolution; `before` and `after` of its window are cut off the result."""

    window: Window
    groups: int


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix on the last dimension."""


@dataclass(frozen=True, slots=True)
class Pool:
    mode: Mode
    window: Window
    include_padding: bool = True
    divisor: int | None = None


@dataclass(frozen=True, slots=True)
class AdaptivePool:
    mode: Mode


@dataclass(frozen=True, slots=True)
class Resize:
    """Up- or down-sampling; `scales` are source rows and columns for each row and column of the result."""

    mode: Mode
    align_corners: bool
    scales: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rearrange:
    """View, permute, flatten, pixel shuffle: every dimension is a product of factors, and factors move.

    `source` and `target` give each dimension as numbers of factors, outermost first; `sizes[i]` is the
    size of factor i. Channel shuffle by 2 of 6 channels: sizes 2, 3; source (0, 1); target (1, 0).
    """

    sizes: tuple[int, ...]
    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Concatenate:
    dimension: int


@dataclass(frozen=True, slots=True)
class Take:
    """A slice: the result's index i along a dimension is the input's start + i * step."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pad:
    mode: Mode
    before: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Each element from the elements at its own place in every input, with broadcasting."""

    inplace: bool = False
    rectifies: bool = False  # its result is 0, and stops the gradient, where its input is not above 0


@dataclass(frozen=True, slots=True)
class Expand:
    """Dimensions of size 1 repeated."""


@dataclass(frozen=True, slots=True)
class Along:
    """The named dimensions are seen whole, the others one by one: softmax over channels, layer norm."""

    dimensions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum, mean or maximum over whole dimensions."""

    dimensions: tuple[int, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over the map, from each device's own part of it."""

    keep: bool


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """Batch norm; frozen uses the running statistics, training those of the whole batch and map."""

    training: bool
    eps: float
    momentum: float | None


@dataclass(frozen=True, slots=True)
class GroupNorm:
    groups: int
    eps: float


@dataclass(frozen=True, slots=True)
class Dropout:
    probability: float
    channels: bool
    inplace: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """Cannot be split: every device that needs a piece of the result computes all of it."""

    reason: str


Operation = (
    Input
    | Constant
    | Convolve
    | Deconvolve
    | Linear
    | Pool
    | AdaptivePool
    | Resize
    | Rearrange
    | Concatenate
    | Take
    | Pad
    | Pointwise
    | Expand
    | Along
    | Reduce
    | Mean
    | BatchNorm
    | GroupNorm
    | Dropout
    | Whole
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight or buffer of a layer, under the user's own name."""

    role: str  # "weight", "bias", "running_mean", ...
    name: str
    shape: Shape
    trainable: bool
    buffer: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Saved:
    """What backward needs of a layer's tensors, and in whose memory its result and gradients lie.

    A ReLU that works in place keeps its result, which is its input's memory: inputs (False,), result True,
    view True. A max pool keeps its input and the place of each maximum: inputs (True,), extra_bytes 8.
    """

    inputs: tuple[bool, ...]
    result: bool
    extra_items: float = 0.0  # kept besides: numbers of the layer's own type for each one of its result
    extra_bytes: float = 0.0  # kept besides, whatever that type is: indices and masks
    view: bool = False  # does the result lie in the first input's memory
    passes: tuple[bool, ...] = ()  # inputs whose gradient is the result's own, in the same memory


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    operation: Operation
    inputs: tuple[str, ...]
    shape: Shape  # of the result, batch included
    parameters: tuple[Parameter, ...] = ()
    dtype: str = "float32"
    differentiable: bool = True  # does a gradient flow back into its result
    saved: Saved | None = None  # None: nobody asked

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes

    def parameter(self, role: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.role == role), None)

    @property
    def statistic(self) -> Statistic | None:
        """What of its input has to be known whole, or None for most layers."""
        match self.operation:
            case BatchNorm(training=True):
                return Statistic.BATCH_NORM
            case GroupNorm():
                return Statistic.GROUP_NORM
            case Mean():
                return Statistic.MEAN
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Graph:
    """Layers in the order in which they are computed, and the names of the model's outputs."""

    layers: tuple[Layer, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for layer in self.layers:
            missing = [name for name in layer.inputs if name not in seen]
            assert not missing, f"{layer.name} reads {missing} before they are computed"
            assert layer.name not in seen, f"two layers are named {layer.name}"
            seen.add(layer.name)
        assert set(self.outputs) <= seen, f"no layer computes {set(self.outputs) - seen}"

    def by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def readers(self) -> dict[str, tuple[str, ...]]:
        """Who reads each layer's result."""
        readers: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for layer in self.layers:
            for name in dict.fromkeys(layer.inputs):
                readers[name].append(layer.name)
        return {name: tuple(names) for name, names in readers.items()}

    def parameters(self) -> dict[str, Parameter]:
        """Every weight and buffer by name, once."""
        return {p.name: p for layer in self.layers for p in layer.parameters}
