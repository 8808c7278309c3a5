"""What a reader of a picture sees: texts and marks with their places in pixels, and what is wrong with them."""

import dataclasses
import functools
import itertools

import numpy as np
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import to_rgb
from matplotlib.transforms import Bbox

# The width that a README has on GitHub, to which a picture is scaled.
README_PX = 838
_SMALLEST_PX = 8.0  # of a text
_CONTRAST = 4.5  # WCAG 2, of a text that is not large
# A viewer without the first of the fonts writes so much wider.
_RESERVE = 1.03


@dataclasses.dataclass(frozen=True)
class Words:
    """One line of text, its box, and what was drawn before it."""

    text: str
    box: Bbox
    size_px: float
    colour: tuple[float, float, float]
    after: int


@dataclasses.dataclass(frozen=True)
class Mark:
    """A marker, a stroke or a filled shape."""

    kind: str
    points: np.ndarray
    colour: tuple[float, float, float]
    width_px: float = 0.0
    alpha: float = 1.0

    @functools.cached_property
    def box(self) -> Bbox:
        return Bbox([self.points.min(axis=0), self.points.max(axis=0)])


class Recorder(RendererBase):
    """Keeps what a figure draws instead of drawing it."""

    def __init__(self, width, height, dpi):
        super().__init__()
        self.measure = RendererAgg(width, height, dpi)
        self.dpi, self.size = dpi, (width, height)
        self.words: list[Words] = []
        self.marks: list[Mark] = []

    def get_canvas_width_height(self):
        return self.size

    def points_to_pixels(self, points):
        return points * self.dpi / 72

    def get_text_width_height_descent(self, s, prop, ismath):
        return self.measure.get_text_width_height_descent(s, prop, ismath)

    def _add(self, gc, kind, points, colour, width_px=0.0, alpha=None):
        clip = gc.get_clip_rectangle()
        if clip is not None:
            points = np.clip(points, clip.min, clip.max) if kind != "stroke" else _within(points, clip)
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            self.marks.append(Mark(kind, points, to_rgb(colour), width_px, gc.get_alpha() if alpha is None else alpha))

    def draw_path(self, gc, path, transform, rgbFace=None):
        polygons = path.to_polygons(transform, closed_only=False)
        for points in polygons:
            if rgbFace is not None:
                face = tuple(rgbFace)
                alpha = face[3] if len(face) > 3 else gc.get_alpha()
                self._add(gc, "filled", points, face[:3], alpha=alpha)
            elif gc.get_linewidth() > 0:
                width_px = self.points_to_pixels(gc.get_linewidth()) if not gc.get_hatch() else 0.0
                self._add(gc, "stroke", points, gc.get_rgb()[:3], width_px)

    def draw_markers(self, gc, marker_path, marker_trans, path, trans, rgbFace=None):
        outline = np.concatenate(marker_path.to_polygons(marker_trans, closed_only=False) or [np.zeros((1, 2))])
        colour = gc.get_rgb()[:3] if rgbFace is None else tuple(rgbFace)[:3]
        for place in trans.transform(path.vertices):
            clip = gc.get_clip_rectangle()
            if np.isfinite(place).all() and (clip is None or clip.padded(1).contains(*place)):
                self.marks.append(Mark("marker", outline + place, to_rgb(colour)))

    def draw_image(self, gc, x, y, im, transform=None):
        height, width = im.shape[:2]
        self._add(gc, "image", np.array([[x, y], [x + width, y + height]], dtype=float), (0, 0, 0))

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        width, height, descent = self.get_text_width_height_descent(s, prop, ismath)
        y = self.size[1] - y  # a text comes with y downwards
        if angle == 0:
            extra = (_RESERVE - 1) * width
            left = {"left": 0.0, "center": extra / 2, "right": extra}[mtext.get_ha() if mtext is not None else "left"]
            box = Bbox.from_bounds(x - left, y - descent, width + extra, height)
        elif angle == 90:
            box = Bbox.from_bounds(x + descent - height, y, height, width)
        else:
            raise NotImplementedError(f"{s}: no picture turns its text by {angle} degrees")
        size_px = self.points_to_pixels(prop.get_size_in_points())
        self.words.append(Words(s, box, size_px, gc.get_rgb()[:3], len(self.marks)))


def _within(points, clip):
    """The points of a stroke, cut off at the edges of `clip`, for strokes along an axis and short ones."""
    inside = (points >= clip.min - 1).all(axis=1) & (points <= clip.max + 1).all(axis=1)
    return np.clip(points, clip.min, clip.max) if inside.any() or len(points) == 2 else points[:0]


def rendered(figure, width_px=README_PX) -> Recorder:
    """`figure`, drawn to be `width_px` wide."""
    figure.set_dpi(width_px / figure.get_figwidth())
    recorder = Recorder(*figure.bbox.size, figure.dpi)
    figure.draw(recorder)
    return recorder


def faults(figure, width_px=README_PX) -> list[str]:
    """What a reader would complain of, each in a sentence."""
    seen = rendered(figure, width_px)
    sheet = Bbox.from_bounds(0, 0, *seen.size)
    ground = to_rgb(figure.get_facecolor())
    words = [each for each in seen.words if each.text.strip()]
    return [
        *_overlapping(words),
        *_outside(words, [mark for mark in seen.marks if mark.kind != "filled"], sheet),
        *_unreadable(words, seen.marks, ground),
        *_hidden(words, seen.marks, sheet),
        *_thin(figure, seen.marks),
        *_empty(figure),
    ]


def _overlapping(words):
    for one, other in itertools.combinations(words, 2):
        if _meets(_beside(one.box), _beside(other.box)):
            yield f"{one.text!r} lies on {other.text!r}"


def _outside(words, marks, sheet):
    for each in words:
        if not _holds(sheet, each.box):
            yield f"{each.text!r} leaves the picture: {each.box.extents.round()}"
    for mark in marks:
        if not _holds(sheet.padded(1), mark.box):
            yield f"a {mark.kind} leaves the picture: {mark.box.extents.round()}"


def _unreadable(words, marks, ground):
    filled = [(number, mark) for number, mark in enumerate(marks) if mark.kind == "filled"]
    boxes = _extents([mark for _, mark in filled])
    for each in words:
        if each.size_px < _SMALLEST_PX:
            yield f"{each.text!r} is {each.size_px:.1f} px high"
        x, y = (each.box.min + each.box.max) / 2
        under = ground
        for hit in np.flatnonzero((boxes[:, 0] < x) & (x < boxes[:, 2]) & (boxes[:, 1] < y) & (y < boxes[:, 3])):
            number, mark = filled[hit]
            if number < each.after:
                under = tuple(mark.alpha * c + (1 - mark.alpha) * u for c, u in zip(mark.colour, under, strict=True))
        if (contrast := _contrast(each.colour, under)) < _CONTRAST:
            yield f"{each.text!r} has a contrast of {contrast:.1f}"


def _hidden(words, marks, sheet):
    """Markers that hide a text, or that a text hides, and edges of shapes that cross one."""
    boxes = _extents(marks)
    for each in words:
        inner = _shrunk(each.box, 1.5)
        near = (boxes[:, :2] < inner.max).all(axis=1) & (boxes[:, 2:] > inner.min).all(axis=1)
        for mark in (marks[number] for number in np.flatnonzero(near)):
            if mark.kind == "marker" and _meets(mark.box, inner):
                yield f"a marker lies on {each.text!r}"
                break
            shape = mark.kind in ("filled", "image") and not _holds(mark.box, inner) and mark.box.width < sheet.width
            if shape and min(mark.box.width, mark.box.height) > 1 and _meets(mark.box, inner) and mark.alpha > 0.2:
                yield f"the edge of a shape crosses {each.text!r}"
                break


def _extents(marks):
    """Left, bottom, right and top of each mark."""
    return np.array([mark.box.extents for mark in marks]).reshape(-1, 4)


def _thin(figure, marks):
    for axes in figure.axes:
        for bars in axes.containers:
            across = "height" if getattr(bars, "orientation", "") == "horizontal" else "width"
            for bar in bars:
                if (pixels := abs(getattr(bar.get_window_extent(), across))) < 1:
                    yield f"a bar is {pixels:.3f} px wide"
        for image in axes.images:
            rows, columns = image.get_array().shape[:2]
            box = axes.bbox
            if min(box.height / rows, box.width / columns) < 1:
                yield f"a cell of {rows} x {columns} is less than a pixel"
    for mark in marks:
        if mark.kind == "stroke" and 0 < mark.width_px < 0.6:
            yield f"a line is {mark.width_px:.2f} px wide"
        if mark.kind == "marker" and 0 < max(mark.box.width, mark.box.height) < 2.5:
            yield f"a marker is {max(mark.box.width, mark.box.height):.1f} px wide"


def _empty(figure):
    """Axes on which nothing can be seen."""
    for axes in figure.axes:
        if not axes.axison:
            continue
        boxes = [patch.get_window_extent() for patch in axes.patches]
        boxes += [line.get_window_extent() for line in axes.lines]
        seen = any(max(box.width, box.height) >= 1 and box.overlaps(axes.bbox) for box in boxes)
        if not (seen or axes.images or axes.collections):
            yield f"nothing is on the axes of {axes.get_xlabel()!r} and {axes.get_ylabel()!r}"


def _meets(one, other, by=0.75):
    """Whether two boxes share more than the edges of letters."""
    shared = Bbox.intersection(one, other)
    return shared is not None and shared.width > by and shared.height > by


def _beside(box):
    """Words on one line are read as one where no space is between them."""
    return Bbox.from_extents(box.x0 - 1.5, box.y0, box.x1 + 1.5, box.y1)


def _holds(outer, inner):
    return bool((inner.min >= outer.min).all() and (inner.max <= outer.max).all())


def _shrunk(box, by):
    return Bbox.from_extents(box.x0 + by, box.y0 + by, max(box.x0 + by, box.x1 - by), max(box.y0 + by, box.y1 - by))


def _contrast(one, other):
    """Of WCAG 2: 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
