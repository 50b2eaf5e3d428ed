"""How far words of a page stand out from what is behind them."""

import re
from collections.abc import Sequence


def contrasts(html: str, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str, str], float]:
    """Contrast of pairs of the page's colours, (palette, front, back) -> ratio, in light and dark: WCAG 2.2, success
    criterion 1.4.3, wants 4.5 of words."""
    palettes: dict[str, dict[str, str]] = {"light": {}, "dark": {}}
    for before, held in re.findall(r"(\S+ ?\{)?\s*:root \{(.*?)\}", html, re.DOTALL):
        palettes["dark" if before else "light"] |= dict(re.findall(r"--([\w-]+): (#\w{6})", held))
    found = {}
    for palette, colours in palettes.items():
        for front, back in pairs:
            light, dark = sorted((_luminance(colours[front]), _luminance(colours[back])), reverse=True)
            found[palette, front, back] = (light + 0.05) / (dark + 0.05)
    return found


def _luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
