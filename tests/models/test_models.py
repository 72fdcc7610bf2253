"""The zoo holds the published networks: same parameters, same names, right shapes, traceable."""

import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

from manyhands import models

PUBLISHED_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg11": 132_863_336,
    "vgg11-bn": 132_868_840,
    "vgg16": 138_357_544,
    "vgg16-bn": 138_365_992,
    "mobilenetv2": 3_504_872,
}

# Shapes of parameters that torchvision's checkpoints hold under these very names.
TORCHVISION_SHAPES = {
    "resnet18": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.1.bn2.bias": (64,),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.running_mean": (128,),
        "fc.weight": (1000, 512),
    },
    "resnet50": {
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.2.bn3.weight": (2048,),
        "fc.bias": (1000,),
    },
    "vgg16": {
        "features.0.weight": (64, 3, 3, 3),
        "features.28.bias": (512,),
        "classifier.0.weight": (4096, 25088),
        "classifier.6.bias": (1000,),
    },
    "vgg11-bn": {
        "features.25.weight": (512, 512, 3, 3),
        "features.26.running_var": (512,),
        "classifier.3.weight": (4096, 4096),
    },
    "mobilenetv2": {
        "features.0.0.weight": (32, 3, 3, 3),
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.1.conv.1.weight": (16, 32, 1, 1),
        "features.2.conv.0.1.weight": (96,),
        "features.17.conv.3.bias": (320,),
        "features.18.0.weight": (1280, 320, 1, 1),
        "classifier.1.weight": (1000, 1280),
    },
}

OTHER_OUTPUTS = {
    "demo": (2, 10),
    "unet": (2, 1, 256, 256),
    "unet-small": (2, 1, 256, 256),
    "paper4-8": (2, 10),
    "yolov2": (2, 5 * (5 + 80), 13, 13),
    "yolov2-16": (2, 256, 38, 38),
    "yolov2-16-nobn": (2, 256, 38, 38),
}


@cache
def on_meta(name: str) -> nn.Module:
    """The network without memory behind its parameters."""
    with torch.device("meta"):
        return models.build(name)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def expected_output(name: str) -> tuple[int, ...]:
    return OTHER_OUTPUTS.get(name, (2, 10) if name.endswith("-cifar") else (2, 1000))


def test_listing_the_zoo_needs_no_torch() -> None:
    script = "import sys; from manyhands.models import names; names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_names_are_the_keys_of_the_zoo() -> None:
    assert models.names() == tuple(models.ZOO)
    assert all(entry.name == name for name, entry in models.ZOO.items())
    assert len(set(models.names())) == 22


def test_unknown_name_is_a_key_error_with_the_name() -> None:
    with pytest.raises(KeyError) as caught:
        models.build("resnet19")
    assert caught.value.args == ("resnet19",)


WITHOUT_CLASSES = {"unet", "unet-small", "yolov2-16", "yolov2-16-nobn"}


@pytest.mark.parametrize("name", [name for name in models.names() if name not in WITHOUT_CLASSES])
def test_as_many_classes_as_asked_for(name: str) -> None:
    images = torch.empty(2, *models.ZOO[name].input_shape, device="meta")
    with torch.device("meta"):
        output = models.build(name, num_classes=7)(images)
    usual = expected_output(name)
    assert tuple(output.shape) == (2, 5 * (5 + 7) if name == "yolov2" else 7, *usual[2:])


@pytest.mark.parametrize("name", sorted(WITHOUT_CLASSES))
def test_classes_of_a_network_without_classes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no classes, so it cannot have 7"):
        models.build(name, num_classes=7)


@pytest.mark.parametrize("num_classes", [0, -3])
def test_no_classes_at_all_are_refused(num_classes: int) -> None:
    with pytest.raises(ValueError, match=f"demo cannot have {num_classes} classes"):
        models.build("demo", num_classes=num_classes)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert num_parameters(on_meta(name)) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", TORCHVISION_SHAPES)
def test_parameters_have_torchvision_names(name: str) -> None:
    state = on_meta(name).state_dict()
    for key, shape in TORCHVISION_SHAPES[name].items():
        assert tuple(state[key].shape) == shape, key


@pytest.mark.parametrize("name", [name for name in models.names() if name.endswith("-cifar")])
def test_cifar_form_differs_in_the_stem_and_head_only(name: str) -> None:
    cifar = {key: value.shape for key, value in on_meta(name).state_dict().items()}
    imagenet = {key: value.shape for key, value in on_meta(name.removesuffix("-cifar")).state_dict().items()}
    assert list(cifar) == list(imagenet)
    changed = {key for key in cifar if cifar[key] != imagenet[key]}
    assert changed == {"conv1.weight", "fc.weight", "fc.bias"}
    assert cifar["conv1.weight"] == (64, 3, 3, 3)


def test_yolo_keeps_the_bias_only_without_batch_norm() -> None:
    with_norm, without_norm = on_meta("yolov2-16"), on_meta("yolov2-16-nobn")
    assert [name for name, _ in with_norm.named_children()] == [str(index) for index in range(16)]
    assert "0.conv.bias" not in with_norm.state_dict() and "0.bn.bias" in with_norm.state_dict()
    assert "0.conv.bias" in without_norm.state_dict() and "0.bn.bias" not in without_norm.state_dict()


def test_yolo_image_is_halved_by_layers_1_3_7_and_11() -> None:
    hidden = torch.empty(1, 3, 608, 608, device="meta")
    sizes = []
    for layer in on_meta("yolov2-16").children():
        hidden = layer(hidden)
        sizes.append(hidden.shape[-1])
    assert sizes == [608] + [304] * 2 + [152] * 4 + [76] * 4 + [38] * 5


def test_yolo_has_as_many_numbers_as_darknets_weight_file() -> None:
    """yolov2.weights has 203,934,260 bytes: a head of 16, then weights, norms and their statistics."""
    numbers = [t.numel() for name, t in on_meta("yolov2").state_dict().items() if "num_batches" not in name]
    assert 16 + 4 * sum(numbers) == 203_934_260


def test_yolo_begins_with_its_first_16_layers() -> None:
    whole, part = (
        {key: value.shape for key, value in on_meta(name).state_dict().items()}
        for name in ("yolov2", "yolov2-16")
    )
    assert part.items() <= whole.items()
    assert {key.split(".")[0] for key in whole} - {key.split(".")[0] for key in part} == {
        *("16", "18", "19", "20", "21", "22", "23", "24", "26", "29", "30")
    }


def test_yolo_passes_fine_detail_around_the_last_pool() -> None:
    """With the coarse way shut the output still tells two images apart; with both shut it cannot."""
    torch.manual_seed(0)
    model = models.build("yolov2", num_classes=1).eval()
    with torch.no_grad():
        model.get_submodule("24.bn").weight.zero_()  # type: ignore[operator,union-attr]
        pictures = torch.randn(2, 3, 64, 64)
        outputs = model(pictures)
        model.get_submodule("26.bn").weight.zero_()  # type: ignore[operator,union-attr]
        blind = model(pictures)
    assert not torch.allclose(outputs[0], outputs[1])
    assert torch.allclose(blind[0], blind[1])


def test_paper4_has_six_convolutions_and_two_linear_layers() -> None:
    kinds = [type(module) for module in on_meta("paper4-8").modules()]
    assert kinds.count(nn.Conv2d) == 6 and kinds.count(nn.Linear) == 2
    assert kinds.index(nn.Linear) > len(kinds) - kinds[::-1].index(nn.Conv2d)


def test_unet_has_the_known_number_of_parameters() -> None:
    assert num_parameters(on_meta("unet")) == 31_037_633


def test_demo_is_small() -> None:
    assert 40_000 < num_parameters(on_meta("demo")) < 60_000


@pytest.mark.parametrize("name", models.names())
def test_traces_and_gives_the_right_shape(name: str) -> None:
    images = torch.empty(2, *models.ZOO[name].input_shape, device="meta")
    traced = fx.symbolic_trace(on_meta(name))
    assert tuple(traced(images).shape) == expected_output(name)


@pytest.mark.parametrize(
    "name", ["demo", "resnet18-cifar", "mobilenetv2", "unet-small", "yolov2-16-nobn", "yolov2", "paper4-8"]
)
def test_traced_network_computes_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name).eval()
    images = torch.randn(2, models.ZOO[name].input_shape[0], 32, 32)
    assert gradients_match(model, fx.symbolic_trace(model), images)


def gradients_match(model: nn.Module, traced: nn.Module, images: Tensor) -> bool:
    """Whether both give finite and equal gradients; they share their parameters."""
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(images).square().mean(), parameters)
    actual = torch.autograd.grad(traced(images).square().mean(), parameters)
    return all(
        bool(torch.isfinite(left).all()) and torch.allclose(left, right)
        for left, right in zip(expected, actual, strict=True)
    )


def noisy(templates: Tensor, labels: Tensor) -> Tensor:
    """Coarse pictures, drawn large as clothes are, under noise half as strong."""
    pictures = nn.functional.interpolate(templates[labels], size=(28, 28), mode="bilinear")
    return pictures + 0.5 * torch.randn_like(pictures)


def test_demo_learns() -> None:
    torch.manual_seed(0)
    templates = torch.randn(10, 1, 4, 4)
    model = models.build("demo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(60):
        labels = torch.randint(10, (32,))
        loss = nn.functional.cross_entropy(model(noisy(templates, labels)), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    labels = torch.randint(10, (200,))
    with torch.no_grad():
        scores = model.eval()(noisy(templates, labels))
    assert (scores.argmax(1) == labels).float().mean() > 0.8
