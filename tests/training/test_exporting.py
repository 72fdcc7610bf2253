"""An exported model gives in onnxruntime what it gives in PyTorch, for a batch of any size."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands import exporting
from manyhands.errors import RequestError, RunError
from manyhands.exporting import export_onnx
from manyhands.loading import load_model
from manyhands.training.checkpoints import save_model

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="exporting is tested where onnx, onnxscript and onnxruntime are installed: manyhands[onnx]",
)

OWN_MODELS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.dropout = nn.Dropout(0.5)
    def forward(self, x, y):
        return self.dropout(self.conv(x)), y.flatten(1).sum(1)

class Fixed(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).reshape(2, 3, 6, 6)

class Branching(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -x

class Named(nn.Conv2d):
    def forward(self, x):
        return {"out": super().forward(x)}

def two(): return Two()
def fixed(): return Fixed(2, 3, 3)
def branching(): return Branching(2, 3, 3)
def named(): return Named(2, 3, 3)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN_MODELS)
    return f"{tmp_path}/own.py"


def trained(reference: str, num_classes: int | None = None, seed: int = 5) -> nn.Module:
    """A model as it is after training: no weight as it was drawn, no running statistic zero or one."""
    model = load_model(reference, num_classes=num_classes)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(tensor + 0.05 * noise if "running_var" not in name else 0.5 + noise)
    return model.eval()


def saved(folder: Path, module: nn.Module, /, **metadata: str) -> Path:
    path = folder / "model.safetensors"
    save_model(path, module.state_dict(), metadata)
    return path


def relative_difference(path: Path, model: nn.Module, *images: torch.Tensor) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    found = session.run(None, {n: image.numpy() for n, image in zip(names, images, strict=True)})
    with torch.no_grad():
        ours = model(*images)
    ours = (ours,) if isinstance(ours, torch.Tensor) else ours
    assert [tuple(a.shape) for a in ours] == [b.shape for b in found]
    return max(
        float((a - torch.from_numpy(b)).abs().max() / a.abs().max()) for a, b in zip(ours, found, strict=True)
    )


@needs_onnx
@pytest.mark.parametrize(
    ("reference", "size"),
    [
        ("demo", "1x28x28"),
        ("resnet18-cifar", "3x32x32"),
        ("unet-small", "3x64x64"),
        ("mobilenetv2", "3x64x64"),
    ],
)
def test_onnxruntime_gives_the_same_outputs(tmp_path: Path, reference: str, size: str) -> None:
    model = trained(reference)
    path = saved(tmp_path, model, model=reference, input=size)
    facts = export_onnx(path, tmp_path / "out" / "model.onnx")
    shape = [int(part) for part in size.split("x")]
    for batch in (1, 5):
        difference = relative_difference(Path(facts.target), model, torch.randn(batch, *shape))
        assert difference <= 1e-4, (batch, difference)
    assert facts.largest_difference is not None and 0 < facts.largest_difference <= 1e-4
    assert facts.inputs == {"input": size} and facts.outputs == ("output",)
    assert facts.num_bytes == Path(facts.target).stat().st_size
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["model.onnx"]  # whole, in one file
    assert f"agrees to {facts.largest_difference:.1e}" in str(facts)


@needs_onnx
def test_several_inputs_and_outputs_are_numbered_and_dropout_is_gone(tmp_path: Path, own: str) -> None:
    model = trained(f"{own}:two")
    path = saved(tmp_path, model, model=f"{own}:two", input="2x8x8,4", anchors="[[1, 2]]")
    facts = export_onnx(path, tmp_path / "model.onnx")
    assert facts.inputs == {"input_0": "2x8x8", "input_1": "4"}
    assert facts.outputs == ("output_0", "output_1")
    difference = relative_difference(
        tmp_path / "model.onnx", model, torch.randn(7, 2, 8, 8), torch.randn(7, 4)
    )
    assert difference <= 1e-4
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["anchors"] == "[[1, 2]]"


@needs_onnx
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_exported_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained("demo").to(dtype)
    facts = export_onnx(saved(tmp_path, model, model="demo"), tmp_path / "model.onnx")
    assert facts.inputs == {"input": "1x28x28"}  # the zoo knows
    assert relative_difference(tmp_path / "model.onnx", model.float(), torch.randn(2, 1, 28, 28)) <= 1e-4


@needs_onnx
def test_outputs_that_differ_are_refused_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are not numbers agree with nothing."""
    target = tmp_path / "model.onnx"
    target.write_text("an older export")
    model = trained("demo")
    next(model.parameters()).data.fill_(float("nan"))
    with pytest.raises(RunError, match=r"model\.onnx is not written: .* differ by nan, limit 1e-04"):
        export_onnx(saved(tmp_path, model, model="demo"), target)
    monkeypatch.setattr(exporting, "TOLERANCE", 0.0)
    with pytest.raises(RunError, match=r"differ by \d\.\de-0[67]"):
        export_onnx(saved(tmp_path, trained("demo"), model="demo"), target)
    assert target.read_text() == "an older export"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "model.safetensors"]


@needs_onnx
def test_the_number_of_classes_is_part_of_the_model(tmp_path: Path) -> None:
    model = trained("demo", num_classes=7)
    export_onnx(saved(tmp_path, model, model="demo", num_classes="7"), tmp_path / "model.onnx")
    assert relative_difference(tmp_path / "model.onnx", model, torch.randn(2, 1, 28, 28)) <= 1e-4
    with pytest.raises(RequestError, match=r"head.weight is float32 7x\d+ there and float32 10x"):
        export_onnx(saved(tmp_path, model, model="demo"), tmp_path / "model.onnx")


@needs_onnx
def test_what_cannot_be_exported_is_refused_in_one_line(
    tmp_path: Path, own: str, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.onnx"
    demo = trained("demo")
    cases = {
        r"does not say which model it is of": saved(tmp_path / "0", demo),
        r"no model is called 'dmeo'\. Did you mean 'demo'": saved(tmp_path / "1", demo, model="dmeo"),
        r"is not of unet-small: .* is missing there": saved(tmp_path / "2", demo, model="unet-small"),
        r"failed on 2x3x28x28: RuntimeError": saved(tmp_path / "3", demo, model="demo", input="3x28x28"),
        r"num_classes is 'ten'": saved(tmp_path / "4", demo, model="demo", num_classes="ten"),
        r"own.py:fixed cannot be exported: it takes a batch of 2 for a constant": saved(
            tmp_path / "5", trained(f"{own}:fixed"), model=f"{own}:fixed", input="2x8x8"
        ),
        r"own.py:branching cannot be exported: GuardOnDataDependent": saved(
            tmp_path / "7", trained(f"{own}:branching"), model=f"{own}:branching", input="2x8x8"
        ),
        r"own.py:named returns dict": saved(
            tmp_path / "6", trained(f"{own}:named"), model=f"{own}:named", input="2x8x8"
        ),
        r"there is no file": tmp_path / "nowhere.safetensors",
        r"own.py is not a whole safetensors file": Path(own),
    }
    for words, path in cases.items():
        with pytest.raises(RequestError, match=words) as raised:
            export_onnx(path, target)
        assert "\n" not in str(raised.value), words
        assert not target.exists()
    assert capfd.readouterr() == ("", "")  # the exporter's own words are many


@needs_onnx
def test_the_model_itself_is_never_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path, trained("demo"), model="demo")
    before = path.read_bytes()
    with pytest.raises(RequestError, match="would be overwritten"):
        export_onnx(path, tmp_path / "." / "model.safetensors")
    assert path.read_bytes() == before


@needs_onnx
def test_a_target_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, trained("demo"), model="demo")
    with pytest.raises(RequestError, match="cannot be written: "):
        export_onnx(path, path / "model.onnx")


@needs_onnx
def test_without_onnxruntime_the_file_is_written_and_said_to_be_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained("demo")
    with monkeypatch.context() as patch:
        hide(patch, "onnxruntime")
        facts = export_onnx(saved(tmp_path, model, model="demo"), tmp_path / "model.onnx")
    assert facts.largest_difference is None and facts.checked_batches == ()
    assert "not checked" in str(facts)
    assert relative_difference(tmp_path / "model.onnx", model, torch.randn(2, 1, 28, 28)) <= 1e-4


@pytest.mark.parametrize("name", ["onnx", "onnxscript"])
def test_missing_packages_are_named_with_the_way_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hide(monkeypatch, name)
    with pytest.raises(RequestError, match=rf"{name}.* pip install manyhands\[onnx\]"):
        export_onnx(tmp_path / "model.safetensors", tmp_path / "model.onnx")


def hide(patch: pytest.MonkeyPatch, hidden: str) -> None:
    find = importlib.util.find_spec
    patch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == hidden else find(name, *rest)
    )
