"""The page in a real browser: no errors, nothing missing, nothing wider than a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("report"),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]

# The page in a frame as wide as a phone, and a script next to it that measures what the browser
# made of it.
MEASURE = """<!doctype html><iframe id="frame" style="width: 390px; height: 844px; border: 0" srcdoc="PAGE"></iframe>
<pre id="found"></pre><script>
document.getElementById("frame").addEventListener("load", event => {
  const page = event.target.contentDocument, view = event.target.contentWindow;
  const boxes = [...page.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect());
  const sizes = [...page.querySelectorAll("figure.third svg text")].map(t => t.getBoundingClientRect().height);
  document.getElementById("found").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth, figures: page.querySelectorAll("figure").length,
    drawn: boxes.filter(b => b.width > 200 && b.height > 60).length,
    smallest: Math.min(...sizes), font: view.getComputedStyle(page.querySelector("svg text")).fontFamily,
  });
});
</script>"""


def browse(page: Path, home: Path) -> tuple[str, list[str]]:
    """The document after loading, and what the browser said on its console."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={home / 'profile'}",
    ]
    command += [
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_no_complaint_and_all_figures(out: Path, tmp_path: Path) -> None:
    text = (out / "index.html").read_text()
    dom, said = browse(out / "index.html", tmp_path)
    assert said == []
    assert dom.count("<figure") == text.count("<figure") == dom.count('<svg role="img"')


def test_fits_a_phone(out: Path, tmp_path: Path) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(MEASURE.replace("PAGE", html.escape((out / "index.html").read_text())))
    dom, said = browse(frame, tmp_path)
    assert said == []
    found = json.loads(html.unescape(re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[0]))
    assert found["width"] <= 390
    assert found["drawn"] == found["figures"] > 10
    assert found["smallest"] > 8


def test_a_complaint_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        '<!doctype html><img src="nowhere.png"><script>missing()</script>'
    )
    assert len(browse(tmp_path / "bad.html", tmp_path)[1]) >= 1
