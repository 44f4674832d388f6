"""What people train with other packages: a small model for each, built by their own functions.

Each function makes the ``Case`` of a package, which is skipped where the package is not installed.
"""

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ignite_engine import loader, seed_everything
from tests.kit.resume import ALL

try:  # transformers and timm do
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:  # PyPI's wheel is for CUDA: a CPU build of torch cannot load its operators, which no case uses
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CASES = {}
REPLAYED = "keeps no state: its batches are replayed"
VECTORS = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))


def case(function):
    CASES[function.__name__] = function
    return function


def layers(width=64):
    return nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))


def sum_loss(model, batch):
    """They learn the sum of their inputs."""
    return functional.mse_loss(model(batch), batch.sum(1, keepdim=True))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class Case:
    """A training.

    Attributes:
        model, data: make those.
        loss: of a model and a batch.
        optimizer: makes that of the parameters that are trained.
        reason: what the reproducibility report says; None: it is empty.
        options: of the ``Checkpoint``.
        shared: its data is the same for each rank, which takes its share; it is trained on two ranks, too.
        prepare: changes this process's settings, in each that trains.
        compare: what a resumed run has the same.
    """

    model: Callable[[], nn.Module] = layers
    loss: Callable[[Any, Any], Any] = sum_loss
    optimizer: Callable[[Any], Any] = adam
    data: Callable[[], Any] = lambda: loader(VECTORS, 4, shuffle=True)
    reason: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shared: bool = True
    prepare: Callable[[], Any] = lambda: None
    compare: tuple[str, ...] = ALL


# -- optimizers --------------------------------------------------------------------------------------------------------


def without_compiler():
    torch.compiler.set_stance("force_eager")  # each of torchao's steps would be compiled first


def of_torchao(name):
    optim = pytest.importorskip("torchao.optim")
    return Case(optimizer=lambda parameters: getattr(optim, name)(parameters, lr=1e-2), prepare=without_compiler)


@case
def torchao_adamw_8bit():
    return of_torchao("AdamW8bit")


@case
def torchao_adamw_4bit():
    return of_torchao("AdamW4bit")


@case
def torchao_adamw_fp8():
    return of_torchao("AdamWFp8")


@case
def bitsandbytes_adamw_8bit():
    optim = pytest.importorskip("bitsandbytes").optim
    return Case(optimizer=lambda parameters: optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=16))


@case
def bitsandbytes_lion_8bit():
    optim = pytest.importorskip("bitsandbytes").optim
    return Case(optimizer=lambda parameters: optim.Lion8bit(parameters, lr=1e-3, min_8bit_size=16))


@case
def schedulefree_adamw():
    package = pytest.importorskip("schedulefree")
    return Case(optimizer=lambda parameters: package.AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=3))


# -- weights of other types --------------------------------------------------------------------------------------------


def on_frozen(change):
    """``change(layer)`` of a frozen layer, below a head that is trained."""

    def model():
        frozen, head = nn.Linear(64, 64).requires_grad_(False), layers()
        return nn.Sequential(change(frozen), head)

    return model


@case
def torchao_int8_weights():
    quantization = pytest.importorskip("torchao.quantization")
    return Case(on_frozen(lambda layer: quantization.quantize_(layer, quantization.Int8WeightOnlyConfig()) or layer))


@case
def torchao_float8_weights():
    quantization = pytest.importorskip("torchao.quantization")
    return Case(on_frozen(lambda layer: quantization.quantize_(layer, quantization.Float8WeightOnlyConfig()) or layer))


@case
def torchao_float8_training():
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(emulate=True)
    only = {"module_filter_fn": lambda module, name: isinstance(module, nn.Linear) and module.out_features > 1}
    return Case(lambda: float8.convert_to_float8_training(layers(), config=config, **only))


@case
def torchao_quantization_aware():
    qat = pytest.importorskip("torchao.quantization.qat")
    quantization = pytest.importorskip("torchao.quantization")

    def model():
        made = layers()
        weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
        quantization.quantize_(made[0], qat.QATConfig(weight_config=weights, step="prepare"))
        return made

    return Case(model)


@case
def torchao_nf4_weights():
    """As the 4-bit weights of bitsandbytes: they hold an object of torchao's, so they are left out."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    class Frozen(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.weight = nn.Parameter(nf4.to_nf4(layer.weight.detach(), 32, 2), requires_grad=False)

        def forward(self, batch):
            return nf4.linear_nf4(batch, self.weight)

    return Case(on_frozen(Frozen), reason="model is saved without", options={"exclude": ["model:0.*"]})


def of_bitsandbytes(kind, **options):
    layer = getattr(pytest.importorskip("bitsandbytes").nn, kind)

    def change(frozen):
        quantized = layer(64, 64, **options)
        quantized.load_state_dict(frozen.state_dict())
        return quantized.requires_grad_(False).to("cpu")  # it quantizes where it moves

    return Case(on_frozen(change))


@case
def bitsandbytes_nf4_weights():
    """They are quantized anew from where they came, as torch cannot load them into a model that has them."""
    case = of_bitsandbytes("Linear4bit", quant_type="nf4", compute_dtype=torch.float32)
    return replace(case, reason="model is saved without", options={"exclude": ["model:0.*"]})


@case
def bitsandbytes_8bit_weights():
    return of_bitsandbytes("Linear8bitLt", has_fp16_weights=False)


# -- models ------------------------------------------------------------------------------------------------------------

TOKENS = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(2))


def of_gpt(change=lambda model: model, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}

    def model():
        return change(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))

    def loss(model, tokens):
        return model(input_ids=tokens, labels=tokens).loss

    return Case(model, loss, data=lambda: loader(TOKENS, 4, shuffle=True), **options)


@case
def transformers_tied_weights():
    return of_gpt()


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    return lambda model: peft.get_peft_model(model, config)


@case
def peft_lora():
    return of_gpt(adapted())


@case
def peft_adapter_alone():
    """The base comes from where it came first; checkpoints hold what is trained."""
    keep = {"keep_fn": lambda part, name, value: part != "model" or "lora_" in name}
    return of_gpt(adapted(), reason="model is saved without", options=keep)


@case
def timm_model_and_optimizer():
    timm = pytest.importorskip("timm")
    images = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    from timm.optim import create_optimizer_v2

    return Case(
        lambda: timm.create_model("test_vit2", num_classes=1, img_size=32, drop_path_rate=0.2),
        lambda model, batch: functional.mse_loss(model(batch)[:, 0], batch.mean((1, 2, 3))),
        lambda parameters: create_optimizer_v2(parameters, "lookahead_adamw", lr=1e-3),
        lambda: loader(images, 4, shuffle=True),
    )


@case
def einops_compiled():
    einops = pytest.importorskip("einops")
    from einops.layers.torch import Rearrange, Reduce

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                Rearrange("b (p w) -> b p w", w=8), nn.Linear(8, 8), Reduce("b p w -> b w", "mean"), layers(8)
            )

        def forward(self, batch):
            return self.layers(einops.rearrange(batch, "b n -> b n"))

    return Case(lambda: torch.compile(Patches(), backend="aot_eager"))


# -- data --------------------------------------------------------------------------------------------------------------


@case
def monai_transforms():
    pytest.importorskip("monai")
    from monai.data import CacheDataset, list_data_collate
    from monai.losses import DiceCELoss
    from monai.transforms import Compose, EnsureChannelFirstd, EnsureTyped, RandFlipd, RandGaussianNoised

    items = [{"image": each.reshape(8, 8), "label": (each.reshape(8, 8) > 0).float()} for each in VECTORS]
    keys = ["image", "label"]
    loss_fn = DiceCELoss(sigmoid=True)

    def data():
        fixed = [EnsureTyped(keys), EnsureChannelFirstd(keys, channel_dim="no_channel")]
        drawn = [RandFlipd(keys, prob=0.5, spatial_axis=0), RandGaussianNoised(["image"], prob=0.5)]
        dataset = CacheDataset(items, Compose([*fixed, *drawn]), progress=False)
        return loader(dataset, 4, shuffle=True, collate_fn=list_data_collate)

    return Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1)),
        lambda model, batch: loss_fn(model(batch["image"]), batch["label"]),
        data=data,
    )


@case
def torchvision_transforms():
    pytest.importorskip("torchvision")
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    class Images(torch.utils.data.Dataset):
        transform = v2.Compose(
            [v2.RandomCrop(6), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2), v2.ToDtype(torch.float32)]
        )

        def __len__(self):
            return len(VECTORS)

        def __getitem__(self, index):
            image = tv_tensors.Image(VECTORS[index].sigmoid().reshape(1, 8, 8).expand(3, 8, 8))
            return self.transform(image).flatten()

    return Case(lambda: layers(108), data=lambda: loader(Images(), 4, shuffle=True))


@case
def torch_geometric_batches():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graphs = [Data(x=each.reshape(4, 16), edge_index=edges, y=each.sum().reshape(1)) for each in VECTORS]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = GCNConv(16, 8), nn.Linear(8, 1)

        def forward(self, batch):
            return self.head(global_mean_pool(self.layer(batch.x, batch.edge_index).relu(), batch.batch))[:, 0]

    return Case(
        Net,
        lambda model, batch: functional.mse_loss(model(batch), batch.y),
        data=lambda: loader(graphs, 4, shuffle=True, collate_fn=Batch.from_data_list),
    )


def of_datasets(make, **options):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": VECTORS.tolist()})
    return Case(loss=lambda model, batch: sum_loss(model, batch["x"]), data=lambda: make(rows), **options)


@case
def datasets_map():
    def noisy(rows):
        return {"x": [torch.tensor(x) + 0.1 * torch.randn(64) for x in rows["x"]]}

    return of_datasets(lambda rows: loader(rows.with_transform(noisy), 4, shuffle=True))


def shuffled(rows):
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6).with_format("torch")


@case
def datasets_streaming():
    return of_datasets(
        lambda rows: DataLoader(shuffled(rows), batch_size=4),
        reason=REPLAYED,
        shared=False,
    )


@case
def datasets_streaming_with_a_state():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return of_datasets(
        lambda rows: stateful.StatefulDataLoader(rows.to_iterable_dataset().with_format("torch"), batch_size=4),
        reason="saves no shuffle buffer",
        shared=False,
        compare=("losses", "metrics"),  # its place at the end of a pass is written in two ways
    )


@case
def webdataset_shards():
    package = pytest.importorskip("webdataset")
    folder = Path(gettempdir()) / "webdataset_of_tests"
    folder.mkdir(exist_ok=True)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(12 * shard, 12 * shard + 12):
                content = json.dumps(VECTORS[index].tolist()).encode()
                about = tarfile.TarInfo(f"{index:03d}.x.json")
                about.size = len(content)
                tar.addfile(about, BytesIO(content))

    def data():
        shards = package.WebDataset(
            str(folder / "{0..1}.tar"), shardshuffle=2, detshuffle=True, seed=1, empty_check=False
        )
        samples = shards.shuffle(6, seed=5).decode().to_tuple("x.json").map(lambda each: torch.tensor(each[0]))
        return DataLoader(samples, batch_size=4)

    return Case(data=data, reason=REPLAYED, shared=False)


@case
def torchdata_nodes():
    nodes = pytest.importorskip("torchdata.nodes")

    def data():
        sampler = torch.utils.data.DistributedSampler(VECTORS, 1, 0, shuffle=True)
        rows = nodes.ParallelMapper(nodes.SamplerWrapper(sampler), VECTORS.__getitem__, num_workers=2, method="thread")
        return nodes.Loader(nodes.Mapper(nodes.Batcher(rows, 4), torch.stack))

    return Case(data=data, shared=False)


@case
def torchdata_stateful_loader():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return Case(data=lambda: stateful.StatefulDataLoader(VECTORS, batch_size=4), shared=False)


def made(case):
    """Its model, in the same state each time, and its optimizer."""
    case.prepare()
    seed_everything(7)
    model = case.model()
    return model, case.optimizer(trained(model))
