"""SVG: the few shapes that a picture of boxes needs."""

import xml.etree.ElementTree as ElementTree


class Drawing:
    """A drawing that grows shape by shape; lengths are in pixels, and colours come from the style sheet's classes."""

    def __init__(self, style: str) -> None:
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
        self._title = ElementTree.SubElement(self._root, "title")
        ElementTree.SubElement(self._root, "style").text = style
        self._background = ElementTree.SubElement(self._root, "rect", {"class": "paper", "rx": "8"})

    def rect(self, kind: str, x: float, y: float, width: float, height: float, radius: float = 0) -> None:
        sizes = {"x": x, "y": y, "width": width, "height": height} | ({"rx": radius} if radius else {})
        self._add("rect", kind, sizes)

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._add("line", kind, {"x1": x1, "y1": y1, "x2": x2, "y2": y2})

    def dot(self, kind: str, x: float, y: float, radius: float) -> None:
        self._add("circle", kind, {"cx": x, "cy": y, "r": radius})

    def text(self, kind: str, x: float, y: float, words: str) -> None:
        self._add("text", kind, {"x": x, "y": y}).text = words

    def finish(self, title: str, width: float, height: float) -> str:
        """The text of the file, with its size and what a screen reader says of it."""
        self._title.text = title
        sizes = {"width": _number(width), "height": _number(height)}
        self._background.attrib.update(sizes)
        self._root.attrib.update(sizes, viewBox=f"0 0 {_number(width)} {_number(height)}")
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, kind: str, sizes: dict[str, float]) -> ElementTree.Element:
        attributes = {"class": kind} | {name: _number(value) for name, value in sizes.items()}
        return ElementTree.SubElement(self._root, tag, attributes)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
