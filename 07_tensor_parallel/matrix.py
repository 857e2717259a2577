"""Cut a matrix by columns or by rows: which products are complete, which a sum's terms.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/matrix.py
Expect: of four products two have to be all-reduced; an MLP that is cut by columns and
    then by rows needs one all-reduce in forward and one in backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import check, gather, join, leave, say


def mlp(x: Tensor, columns: Tensor, rows: Tensor, grad_y: Tensor) -> list[Tensor]:
    """Run `relu(x A) B` forward and backward on this rank's columns of A, rows of B."""
    hidden = x @ columns  # complete: relu may look at it
    y = hidden.relu() @ rows  # a term of the sum over ranks
    dist.all_reduce(y)
    grad_hidden = (grad_y @ rows.T) * (hidden > 0)  # complete
    grad_x = grad_hidden @ columns.T  # a term
    dist.all_reduce(grad_x)
    # The gradients of this rank's columns and rows are complete too.
    return [y, grad_x, x.T @ grad_hidden, hidden.relu().T @ grad_y]


def mlp_rows_first(x_part: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Take twice the communication: relu needs the sum, and y ends in columns."""
    hidden = x_part @ rows  # a term, of which relu would be wrong
    dist.all_reduce(hidden)
    # An all-gather puts the parts one below the other, and these are columns.
    y_columns = (hidden.relu() @ columns).T.contiguous()
    y = y_columns.new_empty(columns.shape[1] * dist.get_world_size(), len(x_part))
    dist.all_gather_single(y, y_columns)  # before torch 2.13: all_gather_into_tensor
    return y.T


def cut(whole: Tensor, dim: int) -> Tensor:
    """Return this rank's part: columns of a matrix (dim 1), or rows (dim 0)."""
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def show_parts(name: str, mine: Tensor, whole: Tensor) -> bool:
    """Say what each rank computed and what makes it whole; tell if that is right."""
    is_complete = mine.shape != whole.shape
    by_rank = " ".join(map(str, gather(mine.tolist())))
    say(f"{name} | {by_rank} {'side by side' if is_complete else 'to be added up'}")
    if is_complete:
        return torch.equal(mine, cut(whole, 1))
    total = mine.clone()
    dist.all_reduce(total)
    return torch.equal(total, whole)


def main() -> None:
    """Multiply small numbers both ways, then run an MLP, and compare with one rank."""
    device = join(at_least=2, at_most=2)
    x = torch.tensor([[1.0, 10.0]], device=device)
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    grad_y = torch.tensor([[1.0, 100.0]], device=device)
    y, grad_x = x @ a, grad_y @ a.T
    say(f"in one process    | x A = {y.tolist()}, gradient of x = {grad_x.tolist()}")
    is_right = [
        show_parts("columns, forward ", x @ cut(a, 1), y),
        show_parts("columns, backward", cut(grad_y, 1) @ cut(a, 1).T, grad_x),
        show_parts("rows, forward    ", cut(x, 1) @ cut(a, 0), y),
        show_parts("rows, backward   ", grad_y @ cut(a, 0).T, grad_x),
    ]
    torch.manual_seed(0)
    shapes = [(8, 16), (16, 64), (64, 16), (8, 16)]
    x, a, b, grad_y = (torch.randn(s).double().to(device) for s in shapes)
    leaves = [t.requires_grad_() for t in (x, a, b)]
    y = (x @ a).relu() @ b
    grads = torch.autograd.grad(y, leaves, grad_y)
    x, a, b = (t.detach() for t in leaves)
    ours = mlp(x, cut(a, 1), cut(b, 0), grad_y)
    right = [y, grads[0], cut(grads[1], 1), cut(grads[2], 0)]
    is_right += [torch.allclose(*pair) for pair in zip(ours, right, strict=True)]
    rows_first = mlp_rows_first(cut(x, 1), cut(a, 0), cut(b, 1))
    is_right.append(torch.allclose(rows_first, y))
    check(all(is_right), f"{len(is_right)} results are those of one process")
    leave()


if __name__ == "__main__":
    main()
