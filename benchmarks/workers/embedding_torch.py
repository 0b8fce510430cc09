"""One process of benchmarks/embedding.py under TorchRec, on CPUs."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from timing import parser, time_steps
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

WARM_UP, BATCHES = 24, 8
ROWS, WIDTH, FEATURES, SAMPLES = 1_000_000, 64, 26, 4096


def main() -> None:
    """Train, and write this process's median milliseconds per step."""
    options = parser(__doc__)
    options.add_argument("--sharding", default="table_wise", help="table_wise, column_wise or row_wise")
    args = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = model_of(args.sharding)
    batches = batches_of(rank)
    time_steps(args, lambda n: step(model, batches[n % BATCHES]), rank, warm_up=WARM_UP, before=dist.barrier)
    os._exit(0)  # Gloo sometimes aborts at exit if another process has closed its connections first


def model_of(sharding: str):
    """Return one table for all features, sharded as ``sharding`` says, with SGD fused into the backward pass."""
    table = torchrec.EmbeddingBagConfig(
        name="table",
        embedding_dim=WIDTH,
        num_embeddings=ROWS,
        feature_names=[f"f{i}" for i in range(FEATURES)],
        pooling=torchrec.PoolingType.SUM,
    )
    bags = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.01})
    device, size = torch.device("cpu"), int(os.environ["WORLD_SIZE"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu", local_world_size=size),
        constraints={"table": ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])},
    )
    sharders = [torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(bags, sharders, dist.group.WORLD)
    return DistributedModelParallel(bags, device=device, plan=plan, sharders=sharders)


def batches_of(rank: int):
    """Return the ids of embedding_tf.py: Zipf(1.2), with different frequent ids per feature."""
    rng = np.random.default_rng(rank)
    shift = np.arange(FEATURES) * (ROWS // FEATURES)
    made = []
    for _ in range(BATCHES):
        ids = ((rng.zipf(1.2, (SAMPLES, FEATURES)) + shift) % ROWS).T.reshape(-1)
        made.append(
            torchrec.KeyedJaggedTensor.from_lengths_sync(
                keys=[f"f{i}" for i in range(FEATURES)],
                values=torch.tensor(ids),
                lengths=torch.ones(FEATURES * SAMPLES, dtype=torch.int32),
            )
        )
    return made


def step(model, batch) -> float:
    """Look up, compute the loss and update."""
    loss = model(batch).values().square().mean()
    loss.backward()
    return float(loss)


if __name__ == "__main__":
    main()
