"""Samples that belong to no class: each image spoiled in one way drawn at random (FedOV's "data destruction")."""

import torch
import torch.nn.functional as F
from torch import Tensor


def destroy(x: Tensor) -> Tensor:
    """(b, ...) samples, each corrupted once, by draws of torch's default CPU generator.

    Images (b, C, H, W): cut or rotate with probability 2/7 each, crop, blur or erase with 1/7 each. Samples of another
    shape, or of fewer than 4 pixels a side, get their numbers in random order.
    """
    if x.ndim != 4 or min(x.shape[2:]) < 4:
        numbers = x.reshape(len(x), -1)
        return numbers.gather(1, torch.rand(numbers.shape).argsort(1).to(x.device)).view(x.shape)
    result = x.clone()
    kinds = torch.randint(7, (len(x),)).to(x.device)
    with torch.autocast(x.device.type, enabled=False):  # pixels and their places keep the precision of `x`
        for kind, operation in enumerate((crop, blur, erase, cut, rotate)):
            chosen = kinds == kind
            if operation in (cut, rotate):
                chosen |= kinds == kind + 2
            if bool(chosen.any()):
                result[chosen] = operation(x[chosen])
    return result


def crop(x: Tensor) -> Tensor:
    """Crop a rectangle of 0.1 to 0.33 of the area, sides 3:4 to 4:3, and resize it to full size."""
    height, width = x.shape[2:]
    area, aspect, *at = torch.rand(4, len(x), device="cpu")
    h, w = _rectangle(0.1 + 0.23 * area, (3 / 4) ** (1 - 2 * aspect), height, width)
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = w, h  # frames go from -1 to 1
    theta[:, 0, 2], theta[:, 1, 2] = (2 * at[0] - 1) * (1 - w), (2 * at[1] - 1) * (1 - h)
    grid = F.affine_grid(theta.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def blur(x: Tensor) -> Tensor:
    """Blur with a Gaussian kernel of 3, 5, 7 or 9 by 1, 3 or 5 pixels or the reverse, deviation 10 to 100 pixels."""
    n, channels, height, width = x.shape
    long, short = 3 + 2 * torch.randint(4, (n,)), 1 + 2 * torch.randint(3, (n,))
    turned, sigma = torch.rand(n) < 0.5, 10 + 90 * torch.rand(n)
    offsets = torch.arange(-4, 5)
    kernels = []
    for size in (torch.where(turned, short, long), torch.where(turned, long, short)):
        kernel = torch.exp(-((offsets / sigma[:, None]) ** 2) / 2) * (offsets.abs() <= size[:, None] // 2)
        kernels.append((kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0).to(x)[:, None])
    rows = F.pad(x, (4, 4, 4, 4), mode="replicate").reshape(1, n * channels, height + 8, width + 8)
    rows = F.conv2d(rows, kernels[0][..., None], groups=n * channels)
    return F.conv2d(rows, kernels[1][:, :, None], groups=n * channels).reshape(x.shape)


def erase(x: Tensor) -> Tensor:
    """Set a rectangle of 0.33 to 0.5 of the area to 0, sides 3:10 to 10:3 if that fits."""
    height, width = x.shape[2:]
    area, aspect, *at = torch.rand(4, len(x))
    h, w = _rectangle(0.33 + 0.17 * area, 0.3 ** (1 - 2 * aspect), height, width)
    inside = []
    for share, place, size in ((h, at[0], height), (w, at[1], width)):
        length = (share * size).round()
        start = (place * (size - length + 1)).floor()
        pixel = torch.arange(size)
        inside.append((pixel >= start[:, None]) & (pixel < (start + length)[:, None]))
    hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return x.masked_fill(hole.to(x.device), 0.0)


def cut(x: Tensor) -> Tensor:
    """Along either axis, swap the halves (1 in 3), or overwrite half the image by another half (2 in 3)."""
    across, swapped = torch.rand(len(x)) < 0.5, torch.rand(len(x)) < 1 / 3
    result = x.clone()
    for axis, chosen in ((2, across), (3, ~across)):
        for change, which in ((swap_halves, chosen & swapped), (overwrite, chosen & ~swapped)):
            if bool(which.any()):
                where = which.to(x.device)
                result[where] = change(x[where], axis)
    return result


def swap_halves(x: Tensor, axis: int) -> Tensor:
    """Swap the two halves along an axis; a middle line stays."""
    size, half = x.shape[axis], x.shape[axis] // 2
    order = torch.arange(size)
    order[:half], order[size - half :] = torch.arange(size - half, size), torch.arange(half)
    return x.index_select(axis, order.to(x.device))


def overwrite(x: Tensor, axis: int) -> Tensor:
    """Overwrite a band of half the size along an axis by another one that starts at least half a band away."""
    size = x.shape[axis]
    half = size // 2
    starts = torch.arange(size - half + 1)
    to = torch.randint(len(starts), (len(x),))
    far = (starts - to[:, None]).abs() >= half / 2
    source = torch.where(far, torch.rand(far.shape), -1.0).argmax(1)
    line = torch.arange(size)
    band = (line >= to[:, None]) & (line < (to + half)[:, None])
    order = torch.where(band, line + (source - to)[:, None], line).to(x.device)
    shape = [len(x), 1, size, 1] if axis == 2 else [len(x), 1, 1, size]
    return x.gather(axis, order.view(shape).expand(x.shape))


def rotate(x: Tensor) -> Tensor:
    """Rotate squares of half a side, at the left and right of a band of rows, by 90, 180 or 270 degrees."""
    side = min(x.shape[2:]) // 2
    return turn(x, torch.randint(x.shape[2] - side + 1, (len(x),)), torch.randint(1, 4, (len(x),)))


def turn(x: Tensor, start: Tensor, turns: Tensor) -> Tensor:
    """Do this with rows from `start` (b,), counter-clockwise by `turns` (b,) times 90 degrees."""
    height, width = x.shape[2:]
    side = min(height, width) // 2
    row, column = torch.arange(height)[None, :, None], torch.arange(width)[None, None, :]
    i = row - start[:, None, None]
    left = column < side
    j = torch.where(left, column, column - (width - side))
    inside = (i >= 0) & (i < side) & (left | (column >= width - side))
    quarter = turns[:, None, None] % 4
    odd = quarter % 2 == 1
    source_i, source_j = torch.where(odd, j, i), torch.where(odd, i, j)
    source_i = torch.where(quarter >= 2, side - 1 - source_i, source_i)
    source_j = torch.where((quarter == 1) | (quarter == 2), side - 1 - source_j, source_j)
    from_row = torch.where(inside, start[:, None, None] + source_i, row)
    from_column = torch.where(inside, source_j + torch.where(left, 0, width - side), column)
    index = (from_row * width + from_column).flatten(1)[:, None].to(x.device)
    return x.flatten(2).gather(2, index.expand(-1, x.shape[1], -1)).view(x.shape)


def _rectangle(area: Tensor, aspect: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return height and width, as shares of the image, of rectangles with a share of its area; all of them fit in."""
    h = (area * aspect * width / height).sqrt()
    h = torch.maximum(torch.minimum(h, torch.ones(())), area)
    return h, area / h
