"""Train with sequences that several ranks share: the byte-level model of `train_byte_lm.py`, its context cut by rank.

    torchrun --nproc-per-node 2 recipes/12_context_parallel.py     # GPUs where there are enough, else CPUs
    python recipes/12_context_parallel.py                          # starts two processes by itself

The documents are longer than what one rank holds, so their attention crosses ranks. Which rank gets which tokens is
derived from the mask, anew for each batch: pairs are balanced, and only rows that some query sees are moved. Beside it
each process trains on whole sequences, from the same seed: the losses must agree, step by step.
"""

from __future__ import annotations

import os
import subprocess
import sys

import common  # noqa: F401  finds the package in the source tree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from train_byte_lm import ByteGPT, Corpus, Size, update

import composattn as ca

SIZE = Size(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, context=512, window=200, batch=2)
STEPS = 6
TOLERANCE = 1e-5  # of a loss in fp32: both sum the same numbers in another order


def start_ranks(count: int = 2) -> int:
    """This program again, as `count` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    return subprocess.run(command, check=False).returncode


def shared_step(
    model: ByteGPT, optimizer: torch.optim.Optimizer, cp: ca.ContextParallel, batch: tuple[torch.Tensor, ...]
) -> tuple[float, ca.parallel.Shard]:
    """One step of all ranks together; the loss before it, and who had what."""
    tokens, targets, doc = batch
    model.doc.copy_(doc)
    shard = cp.plan(model.attn, SIZE.context, batch=SIZE.batch, heads=SIZE.heads)
    mine, wanted = shard.scatter(tokens), shard.scatter(targets)
    with cp:
        logits = model(mine, doc, shard.positions.to(tokens.device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100, reduction="sum")
        loss = loss / (targets != -100).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
    for parameter in model.parameters():  # each rank has the gradient of its tokens; DDP or FSDP would add them up
        dist.all_reduce(parameter.grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole), shard


def train(device: torch.device) -> None:
    corpus = Corpus.of_standard_library(100_000)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with device:
            models.append(ByteGPT(None, torch.float32, SIZE))
    shared, alone = models
    steps = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    cp = ca.ContextParallel(dist.group.WORLD)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        batch = tuple(t.to(device) for t in corpus.batch(generator, SIZE))
        loss, shard = shared_step(shared, steps[0], cp, batch)
        expected = float(update(alone, steps[1], *batch))
        if cp.ranks.rank == 0:
            longest = int(torch.bincount(batch[2][0].long()).max())
            print(f"step {step}: loss {loss:.6f}, of one process {expected:.6f}; longest document {longest} tokens")
            if step == STEPS - 1:
                print(shard.explain())
        if not abs(loss - expected) <= TOLERANCE * expected:
            raise SystemExit(f"step {step}: the losses differ, {loss} and {expected}")


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit(start_ranks())
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    train(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
