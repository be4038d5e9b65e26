"""Models on meshes of several dimensions, as ranks train them: sharded parameters, tensor parallel, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn.mods import causal, document
from composattn.parallel.division import divide
from composattn.parallel.movement import Movement
from tests.parallel_cases import documents_of

T = torch.Tensor
HEADS, KV_HEADS, WIDTH, HEAD_DIM, BATCH = 4, 2, 24, 8, 2


class Block(torch.nn.Module):
    """Attention and its projections, of as many heads as they have here."""

    def __init__(self, attn: ca.Attention) -> None:
        super().__init__()
        self.attn = attn
        self.q, self.k, self.v = (
            torch.nn.Linear(WIDTH, HEAD_DIM * heads, bias=False) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.o = torch.nn.Linear(HEAD_DIM * HEADS, WIDTH, bias=False)

    def forward(self, x: T) -> T:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(self.attn(q, k, v).transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """Two blocks that share one attention, and a loss of each token."""

    def __init__(self, attn: ca.Attention, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(attn) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 7, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: T, labels: T) -> T:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def made(attn: ca.Attention, checkpointed: bool = False) -> Model:
    """A model whose parameters are equal in every process."""
    torch.manual_seed(0)
    return Model(attn, checkpointed).double()


def batch(length: int, count: int = BATCH) -> tuple[T, T]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(7, (count, length), generator=generator)


def gradients(model: Model) -> dict[str, T]:
    """Whole ones, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name.replace("_checkpoint_wrapped_module.", "")] = (
            grad.full_tensor() if isinstance(grad, DTensor) else grad
        )
    return found


def apart(found: dict[str, T], wanted: dict[str, T]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted)


def documents_and_attention(length: int) -> ca.Attention:
    return ca.Attention(mask_mod=causal() & document(documents_of(length)))


def one_process(length: int) -> tuple[float, dict[str, T]]:
    """The loss, and its gradients, of all tokens in one process."""
    model = made(documents_and_attention(length))
    loss = model(*batch(length))
    loss.backward()
    return loss.item(), gradients(model)


def trained(
    length: int, cp: ca.ContextParallel, model: Model, mine: Callable[[T], T]
) -> tuple[float, dict[str, T], Any]:
    """The loss of this rank's tokens, gradients, and the shard; `mine`: of a batch the entries that this rank has."""
    shard = cp.plan(model.blocks[0].attn, length, batch=BATCH)
    x, labels = (shard.scatter(mine(t)) for t in batch(length))
    with cp:
        loss = model(x, labels)
        loss.backward()
    return loss.item(), gradients(model), shard


def summed(loss: float, mesh: DeviceMesh) -> float:
    """Over all ranks of `mesh`."""
    total = torch.tensor(loss, dtype=torch.float64)
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return float(total)


def fully_sharded(rank: int, ranks: int) -> dict[str, float]:
    """FSDP2 over both dimensions of a mesh, of which one shares sequences and the other batches."""
    length = 48 * (ranks // 2)
    wanted, of_one = one_process(length)
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    model = made(documents_and_attention(length))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=both).set_gradient_divide_factor(1.0)  # losses are sums, so gradients are added
    place = mesh.get_local_rank("dp")
    loss, found, _ = trained(length, ca.ContextParallel(mesh, dim="cp"), model, lambda t: t[place : place + 1])
    return {"loss": abs(summed(loss, both) / wanted - 1), "gradients": apart(found, of_one)}


def tensor_parallel(rank: int, ranks: int) -> dict[str, float]:
    """Heads over one dimension of a mesh (columns of q, k and v, rows of o), sequences over the other."""
    length = 48 * (ranks // 2)
    wanted, of_one = one_process(length)
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("tp", "cp"))
    model = made(documents_and_attention(length))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    loss, found, _ = trained(length, ca.ContextParallel(mesh, dim="cp"), model, lambda t: t)
    for grad in found.values():
        torch.distributed.all_reduce(grad, group=mesh.get_group("cp"))
    return {"loss": abs(summed(loss, mesh["cp"]) / wanted - 1), "gradients": apart(found, of_one)}


def checkpointed(rank: int, ranks: int) -> dict[str, int | bool]:
    """What a step divides, plans and moves, with activations kept and computed again."""
    length = 48 * ranks
    found = []
    for again in (False, True):
        cp, model = ca.ContextParallel(torch.distributed.group.WORLD), made(documents_and_attention(length), again)
        with (
            patch("composattn.parallel.context.divide", wraps=divide) as divided,
            patch("composattn.parallel.shard.Movement.of", wraps=Movement.of) as planned,
        ):
            loss, grads, _ = trained(length, cp, model, lambda t: t)
        found.append((loss, grads, divided.call_count, planned.call_count, cp.ranks.moved_bytes))
    (loss, grads, _, plans, moved), (loss_again, grads_again, divisions, plans_again, moved_again) = found
    return {
        "the same loss": loss == loss_again,
        "the same gradients": all(torch.equal(grads[name], grads_again[name]) for name in grads),
        "divisions": divisions,
        "as many plans of movement": plans == plans_again,
        "keys came again": moved < moved_again < 2 * moved,
    }
