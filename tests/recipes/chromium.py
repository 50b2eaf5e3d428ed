"""A headless browser for the tests of the page."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--proxy-server=http://127.0.0.1:9",  # nothing leaves the machine, whatever is asked for
)
# Run in a copy of the page, which stands in a frame since a window has a least width: all rows open, and into the page
# around the frame what is to be known.
PROBE = """<script>
document.querySelectorAll("details").forEach(row => row.open = true);
const words = [...document.querySelectorAll("svg text")].map(word => {
  const box = word.getBBox(), view = word.ownerSVGElement.viewBox.baseVal;
  return {
    text: word.textContent,
    size: parseFloat(getComputedStyle(word).fontSize) * word.getScreenCTM().a,
    inside: box.x >= 0 && box.y >= 0 && box.x + box.width <= view.width && box.y + box.height <= view.height,
  };
});
const pictures = [...document.querySelectorAll("svg")].map(picture => {
  const box = picture.getBoundingClientRect();
  return [box.width, box.height];
});
const measured = parent.document.createElement("pre");
measured.id = "measured";
measured.textContent = JSON.stringify({
  inner: innerWidth, scroll: document.documentElement.scrollWidth, words, pictures, title: document.title,
  scripts: document.querySelectorAll("script").length, small: Math.min(...[...document.querySelectorAll("main *")]
    .filter(part => part.textContent.trim()).map(part => parseFloat(getComputedStyle(part).fontSize))),
});
parent.document.body.append(measured);
</script>"""


class Chromium:
    """A browser with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip("needs a browser: `make browser`, or install chromium")
        self.program, self.folder = found, folder

    def run(self, page: Path, width: int, *arguments: str, height: int = 2000) -> tuple[str, str]:
        """Open a page at a width: what the browser writes, and what it logs."""
        sizes = (f"--user-data-dir={self.folder / 'profile'}", f"--window-size={width},{height}")
        command = [self.program, *QUIET, *sizes, *arguments, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, done.stderr

    def measured(self, page: Path, width: int) -> dict[str, Any]:
        """What `PROBE` finds in a page, and `console`: what the page made the browser say."""
        text = page.read_text(encoding="utf-8")
        probed = self.folder / "probed.html"
        # The page forbids all scripts, itself included.
        allowed = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
        assert allowed != text
        inner = escape(allowed.replace("</body>", f"{PROBE}</body>"))
        frame = f'<iframe style="border: 0; width: {width}px; height: 2000px" srcdoc="{inner}"></iframe>'
        probed.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}</body>", encoding="utf-8")
        dom, log = self.run(probed, 1400, "--dump-dom")
        found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
        assert found, dom[-2000:]
        return json.loads(unescape(found[1])) | {"console": self.console(log)}

    def opened(self, page: Path) -> tuple[list[str], list[str]]:
        """The page as it is: what the browser says of it, and what it asked for beside files."""
        log = self.folder / "net.json"
        _, said = self.run(page, 1280, "--dump-dom", f"--log-net-log={log}")
        # Requests of a page that is a file; the browser makes some of its own too.
        of_the_page = r'"site_for_cookies":"SiteForCookies: {site=file:[^"]*","url":"([^"]+)"'
        asked = re.findall(of_the_page, log.read_text(encoding="utf-8"))
        return self.console(said), [url for url in asked if not url.startswith(("file:", "data:"))]

    def screenshot(self, page: Path, width: int) -> Any:
        """A picture of the page from its top, RGB."""
        from PIL import Image

        file = self.folder / f"{width}.png"
        self.run(page, width, f"--screenshot={file}", height=5000)
        with Image.open(file) as picture:
            return picture.convert("RGB")

    @staticmethod
    def console(log: str) -> list[str]:
        return [line for line in log.splitlines() if ":CONSOLE" in line]
