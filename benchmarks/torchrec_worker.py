"""One process of TorchRec on CPUs, benchmarks/embedding.py's peer, in an environment of its own without TensorFlow.

python -m venv .cache/torchrec && . .cache/torchrec/bin/activate
pip install torch==2.13.0 torchrec==1.8.0 && pip uninstall fbgemm-gpu
pip install --no-deps fbgemm-gpu-cpu==1.8.0      # torchrec brings a newer one that does not load
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

WARMUP_STEPS, BATCHES = 24, 8
ROWS, WIDTH, FEATURES, SAMPLES = 1_000_000, 64, 26, 4096


def main() -> None:
    """Train and write this process's median milliseconds a step as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharding", default="table_wise", help="table_wise, column_wise or row_wise")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True, help="where results go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = model_of(args.sharding)
    batches = batches_of(rank)
    for number in range(WARMUP_STEPS):
        step(model, batches[number % BATCHES])
    seconds = []
    for number in range(args.steps):
        dist.barrier()
        started = time.perf_counter()
        step(model, batches[number % BATCHES])
        seconds.append(time.perf_counter() - started)
    result = {
        "ms": 1000 * sorted(seconds)[len(seconds) // 2],
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    (args.folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()


def model_of(sharding: str):
    """Return one table for all features, cut as ``sharding`` says, with SGD fused into the backward pass."""
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
    """Return the ids of benchmarks/embedding_worker.py: Zipf(1.2), every feature with favourites of its own."""
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
