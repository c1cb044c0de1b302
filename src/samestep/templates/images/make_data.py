"""Makes the sample data: data/images, noisy shapes in a folder a class. Delete it once your own data is there."""

import random
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

IMAGES = 80  # of each class
SIZE = 16  # pixels

Box = tuple[int, int, int, int]


def triangle(draw: ImageDraw.ImageDraw, box: Box) -> None:
    left, top, right, bottom = box
    draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=200)


SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, Box], None]] = {
    "circle": lambda draw, box: draw.ellipse(box, fill=200),
    "square": lambda draw, box: draw.rectangle(box, fill=200),
    "triangle": triangle,
}


def main() -> None:
    """Write the images next to this script, the same at every call."""
    draw = random.Random(0)
    for name, shape in SHAPES.items():
        folder = Path(__file__).parent / "data" / "images" / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(IMAGES):
            noise = bytes(draw.randrange(60) for _ in range(SIZE * SIZE))
            image = Image.frombytes("L", (SIZE, SIZE), noise)
            left, top, width = draw.randrange(5), draw.randrange(5), draw.randrange(7, 11)
            shape(ImageDraw.Draw(image), (left, top, left + width, top + width))
            image.save(folder / f"{index:03}.png")


if __name__ == "__main__":
    main()
