"""Measured program: training steps of PyTorch's DistributedDataParallel, or FSDP2, on gloo.

It runs in an environment of its own, see `make ddp`, so it imports nothing of TensorFlow's.
"""

from __future__ import annotations

import os

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import worker, worker_ddp_sleep

# Filters inside the blocks of a stage of ResNet-50, and number of blocks.
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
_BATCHES = {"resnet50": (32, 64), "vgg_like": (64, 32)}  # global batch, rows and columns
_CLASSES = 1000


class Bottleneck(nn.Module):
    """relu(shortcut + three convolutions), as `recipes/models/resnet50.py` builds it."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_norm(channels, filters, 1),
            nn.ReLU(),
            *conv_norm(filters, filters, 3, stride),
            nn.ReLU(),
            *conv_norm(filters, 4 * filters, 1),
        )
        is_projected = stride > 1 or channels != 4 * filters
        projection = conv_norm(channels, 4 * filters, 1, stride) if is_projected else []
        self.shortcut = nn.Sequential(*projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.shortcut(x) + self.body(x))


def conv_norm(channels: int, filters: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution without bias and its normalisation."""
    conv = nn.Conv2d(channels, filters, size, stride, padding=size // 2, bias=False)
    return [conv, nn.BatchNorm2d(filters)]


def resnet50() -> nn.Module:
    """Return ResNet-50."""
    layers: list[nn.Module] = [*conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (filters, n_blocks) in enumerate(_STAGES):
        for block in range(n_blocks):
            layers.append(Bottleneck(channels, filters, 2 if stage and not block else 1))
            channels = 4 * filters
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES)
    )


def vgg_like() -> nn.Module:
    """Return the network of `workloads' vgg_like`."""
    layers: list[nn.Module] = []
    for channels, filters in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, _CLASSES))


MODELS = {"resnet50": resnet50, "vgg_like": vgg_like}


def distribute(system: str, model: nn.Module) -> nn.Module:
    """Return the model whose gradients are averaged over ranks in the way of a system."""
    if system == "ddp-compute":
        return model
    if system == "ddp-fsdp":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    # PowerSGD sends the second factor of a bucket when the first has arrived: with several buckets
    # in an order that differs by rank, which gloo answers with an error. So there is one bucket.
    buckets = {"bucket_cap_mb": 1024} if system == "ddp-powersgd" else {}
    wrapped = nn.parallel.DistributedDataParallel(model, **buckets)
    if system == "ddp-fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif system == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def main() -> None:
    """Measure the steps of one model."""
    parser = worker.parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--block", type=int, default=1, help="steps whose mean is one duration")
    parser.add_argument("--sleep", type=float, help="layers sleep, of cores that are so fast")
    options = parser.parse_args()
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("FI_TCP_IFACE", "lo")
    store = f"file://{options.output.absolute()}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    torch.manual_seed(1)
    if options.sleep:
        made: nn.Module = worker_ddp_sleep.build(options.model, options.sleep)
    else:
        made = MODELS[options.model]()
    model = distribute(options.system, made)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    torch.manual_seed(rank)
    global_batch, side = _BATCHES.get(options.model, (8 * size, 1))
    pictures = torch.rand(global_batch // size, 3, side, side)
    labels = torch.randint(_CLASSES, (global_batch // size,))

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(pictures.requires_grad_(bool(options.sleep)))
        loss = outputs.mean() if options.sleep else nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()

    step()
    start_s = worker.since_start()
    distributed.barrier()
    samples = worker.sample(step, options.warmup, options.repeats)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    worker.write(
        options.output,
        rank,
        {options.model: samples},
        start_s=start_s,
        n_parameters=n_parameters,
        torch_version=torch.__version__,
    )
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
