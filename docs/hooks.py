"""What the site's build does beyond MkDocs: search in files on disk takes its helper from the site itself, a page shows
a notebook's cells, and one is CONTRIBUTING.md of the repository."""

import json
import re
from pathlib import Path
from typing import Any

SHIM, OURS = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker/shim.js"  # iframe-worker 1.0.4, MIT
BOOSTS = {"runbook": 8, "start/": 4, "concepts/": 3, "glossary": 3, "deployment": 2, "data.": 2, "utility.": 2}
BOOSTS |= {"adr/": 0.3, "architecture": 0.2, "api": 0.05, "notebook": 0.3, "lab/": 0.3}
"""What a reader in a hurry looks for comes before what explains how it is built."""
SEARCH = {
    "lunr.tokenizer.separator=": r"lunr.QueryLexer.termSeparator=/\s+/,lunr.tokenizer.separator=",
    "return t.trim().split(": r'return t.replace(/(^|\s)-+(?=\w)/g,"$1").trim().split(',
}
"""In the search's own script: what is typed is split as the pages are: `wrong-codec` is one word, and `--hosts`.
As it comes, a dash divides a query everywhere, and before a word it means "without"."""
CELLS, GUIDE = "<!-- cells -->", "<!-- CONTRIBUTING.md -->"


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    return output.replace(SHIM, "../" * page.url.count("/") + OURS)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """A long name in a table may be broken after an underline or a slash; a date, a number and an option nowhere."""
    html = re.sub(r"<code(?=>--[\w-]{1,28}</code>)", '<code class="option"', html)
    html = re.sub(r"<td(?=>[\de., -]+</td>)", '<td class="number"', html)
    return re.sub(r"(?<=<code>)[\w/.:-]{25,}(?=</code>)", lambda name: re.sub(r"([_/])", r"\1<wbr>", name[0]), html)


def on_post_build(*, config: Any) -> None:
    """No server gives out a page of its own for what is missing, and in files on disk its links would lead nowhere."""
    (Path(config.site_dir) / "404.html").unlink()
    (worker,) = (Path(config.site_dir) / "assets/javascripts/workers").glob("search.*.js")
    script = worker.read_text(encoding="utf-8")
    for before, after in SEARCH.items():
        assert script.count(before) == 1, f"another Material for MkDocs: {before} is not what its search says"
        script = script.replace(before, after)
    worker.write_text(script, encoding="utf-8")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    for folder, boost in BOOSTS.items():
        if page.file.src_uri.startswith(folder):
            page.meta["search"] = {"boost": boost}
    if GUIDE in markdown:
        guide = Path(page.file.abs_src_path).parent.parent / "CONTRIBUTING.md"
        text = guide.read_text(encoding="utf-8").replace("](docs/", "](")
        return text.replace("[SECURITY.md](SECURITY.md)", "`SECURITY.md`")
    if CELLS not in markdown:
        return markdown
    notebook = Path(page.file.abs_src_path).with_suffix(".ipynb")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return markdown.replace(CELLS, "\n\n".join(part for cell in cells for part in _parts(cell)))


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source.removeprefix("# ").partition("\n")[2] if source.startswith("# ") else source]
    shown = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            shown.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
        else:
            shown.append(
                f'<img alt="What the cell above draws" src="data:image/png;base64,{output["data"]["image/png"]}">'
            )
    return shown
