"""bench_plot.py: line and bar charts without a plotting library.

    draw("latency.svg", "Waiting", "requests per second", "ms", {"p50": [(1, 20), (2, 31)]})
    draw_bars("quant.svg", "One stream", "tokens per second", {"int8": [270, 262, 281]})

SVG is text, so it is written here; other endings (.png, .pdf) go to matplotlib.

CONTENTS
     1  Axes
     2  Lines
     3  Bars
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
from html import escape
from pathlib import Path


# ==================================================================================================
# 1  Axes
# ==================================================================================================
# A reader compares heights, so they start at 0; numbers on an axis are few and round.

def ticks(low, high, count=5):
    """Round numbers that cover low to high, about `count` of them.

    >>> ticks(0, 97), ticks(0.1, 0.9, 4)
    ([0, 20, 40, 60, 80, 100], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    raw = (high - low or abs(high) or 1) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) if digits else int(i * step) for i in range(first, last + 1)]

def label(x):
    """
    >>> label(2000), label(0.5), label(3.0)
    ('2,000', '0.5', '3')
    """
    return f"{x:,.0f}" if x == int(x) else f"{x:,g}"

def picture(path):
    """An argparse type: a file that can be drawn here."""
    if Path(path).suffix != ".svg" and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{path} needs matplotlib; .svg does not")
    return path


# ==================================================================================================
# 2  Lines
# ==================================================================================================
# One chart, one question: how one figure follows one variable, a line for each case.

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 76, 24, 56, 60
COLORS = "#1f5fa8", "#c4561c", "#3b8a3e", "#7a3e9d", "#555555"

def draw(path, title, x_label, y_label, lines, log_x=False):
    """Draw {name: [(x, y), ...]} to a file; nothing without a path."""
    if not path:
        return
    (draw_svg if Path(path).suffix == ".svg" else draw_matplotlib)(
        path, title, x_label, y_label, lines, log_x)
    print(f"plot           {path}")

def draw_svg(path, title, x_label, y_label, lines, log_x=False):
    """y starts at 0, so that a ratio of heights is a ratio of numbers; x ticks are the values that
    were measured; the legend stands above the lines, where it can hide none."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = ticks(0, max(y for points in lines.values() for _, y in points) or 1)
    scale = math.log if log_x else float
    low, high = scale(xs[0]), scale(xs[-1])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    at_x = lambda x: LEFT + wide * ((scale(x) - low) / (high - low) if high > low else 0.5)
    at_y = lambda y: TOP + tall * (1 - y / ys[-1])
    out = opening(HEIGHT, LEFT, title)
    for y in ys:
        out.append(f'<path d="M{LEFT} {at_y(y):.1f}h{wide}" stroke="#dddddd"/>')
        out.append(text(LEFT - 8, at_y(y) + 4, label(y), 'text-anchor="end"'))
    shown = -math.inf
    for x in xs:
        out.append(f'<path d="M{at_x(x):.1f} {TOP + tall}v5" stroke="#555555"/>')
        if at_x(x) - shown >= 36:  # labels keep their distance
            out.append(text(at_x(x), TOP + tall + 20, label(x), 'text-anchor="middle"'))
            shown = at_x(x)
    middle = TOP + tall / 2
    out.append(text(LEFT + wide / 2, HEIGHT - 16, x_label, 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle})"'
    out.append(text(18, middle, y_label, turned))
    place = LEFT
    for (name, points), color in zip(lines.items(), COLORS):
        way = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{color}"/>'
                for x, y in points]
        out.append(f'<path d="M{place} 40h18" stroke="{color}" stroke-width="3"/>')
        out.append(text(place + 24, 44, name))
        place += 44 + 7 * len(name)
    Path(path).write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")

def opening(height, left, title):
    """First lines of a picture: a white ground and its title."""
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            text(left, 22, title, 'font-size="15" font-weight="bold"')]

def text(x, y, words, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(str(words))}</text>'

def canvas(height):
    """(pyplot, figure, axes) of matplotlib, without a window."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot, *pyplot.subplots(figsize=(6.4, height), layout="constrained")

def draw_matplotlib(path, title, x_label, y_label, lines, log_x=False):
    pyplot, figure, axes = canvas(4)
    for (name, points), color in zip(lines.items(), COLORS):
        axes.plot(*zip(*points), "o-", color=color, label=name)
    if log_x:
        axes.set_xscale("log")
    xs = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(xs, [label(x) for x in xs])
    axes.minorticks_off()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ==================================================================================================
# 3  Bars
# ==================================================================================================
# One figure of many cases: names need room, so the bars lie. A thin line is the spread of repeats.

BAR, LETTER = 22, 7  # pixels: of a bar and the gap below it, of a letter of a name

def draw_bars(path, title, x_label, bars):
    """Draw {name: values of the repeats} as bars up to their medians; nothing without a path."""
    if not path:
        return
    if any(len(values) > 1 for values in bars.values()):
        x_label += " (median; the line is from the smallest to the largest)"
    (bars_svg if Path(path).suffix == ".svg" else bars_matplotlib)(path, title, x_label, bars)
    print(f"plot           {path}")

def bars_svg(path, title, x_label, bars):
    left = 20 + LETTER * max(map(len, bars))
    top, bottom, end = 40, 48, 60  # end: room for the number behind the longest bar
    tall, wide = BAR * len(bars), WIDTH - left - end
    xs = ticks(0, max(max(values) for values in bars.values()) or 1)
    at_x = lambda x: left + wide * x / xs[-1]
    out = opening(top + tall + bottom, 12, title)
    for x in xs:
        out.append(f'<path d="M{at_x(x):.1f} {top}v{tall}" stroke="#dddddd"/>')
        out.append(text(at_x(x), top + tall + 16, label(x), 'text-anchor="middle"'))
    for i, (name, values) in enumerate(bars.items()):
        y, middle = top + BAR * i, statistics.median(values)
        out.append(text(left - 8, y + 15, name, 'text-anchor="end"'))
        out.append(f'<rect x="{left:.1f}" y="{y + 4}" width="{at_x(middle) - left:.1f}" '
                   f'height="{BAR - 8}" fill="{COLORS[0]}"/>')
        if len(values) > 1:
            out.append(f'<path d="M{at_x(min(values)):.1f} {y + 11}H{at_x(max(values)):.1f}" '
                       f'stroke="{COLORS[1]}" stroke-width="2"/>')
        out.append(text(at_x(max(values)) + 6, y + 15, label(float(f"{middle:.3g}"))))
    out.append(text(WIDTH / 2, top + tall + 36, x_label, 'text-anchor="middle"'))
    Path(path).write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")

def bars_matplotlib(path, title, x_label, bars):
    pyplot, figure, axes = canvas(1.2 + 0.24 * len(bars))
    middles = [statistics.median(values) for values in bars.values()]
    reach = [[m - min(v) for m, v in zip(middles, bars.values())],
             [max(v) - m for m, v in zip(middles, bars.values())]]
    drawn = axes.barh([*bars], middles, xerr=reach, color=COLORS[0], ecolor=COLORS[1])
    axes.bar_label(drawn, [label(float(f"{m:.3g}")) for m in middles], padding=4)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=12)  # over and under the names, too: both may be long
    figure.supxlabel(x_label, fontsize=10)
    axes.margins(x=0.12)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
