"""A hook of MkDocs that reads pages as a code host does.

README.md links to docs/checkpoints.md, and that one to ../examples/gan.py: files outside of docs/ that pages link to
are brought onto the site, and the links lead there. A list or a table may follow a paragraph without an empty line.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import quote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"  # the site's first page
ROOTS = (HOME, "CONTRIBUTING.md", "CHANGELOG.md")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".ipynb": "json"}

_FENCE = re.compile(r"(^[ \t]*```.*?^[ \t]*```[ \t]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")

_BEGINS = re.compile(r"(?:[-*] |1\. |\|)")  # a list, or a table

_repository_path: dict[str, str] = {}  # of each page of the site that is not in docs/


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages at the top level and, from page to page, each file and folder that is linked to."""
    _repository_path.clear()
    waiting = [*ROOTS, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]
    seen = set(waiting)
    for path in ROOTS:
        _add(path, files, config)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target not in seen:
                seen.add(target)
                if files.get_file_from_path(uri_of(target)) is None:
                    _add(target, files, config)
                if target.endswith(".md"):
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page in the words of Python-Markdown, with links to files of the repository as links within the site."""
    source = _repository_path.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def within_the_site(match: re.Match[str]) -> str:
        target = resolved(source, match[2])
        if target is None:
            return match[0]  # MkDocs names it
        link = posixpath.relpath(uri_of(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{quote(link)}{match[3] or ''}{match[4]}"

    parts = [
        part if index % 2 else _LINK.sub(within_the_site, part) for index, part in enumerate(_FENCE.split(markdown))
    ]
    return "".join(part if index % 2 else _apart(part, index > 0) for index, part in enumerate(parts))


def _apart(text: str, after_code: bool) -> str:
    """``text`` with an empty line between a paragraph, or code, and the list or table that follows it."""
    lines: list[str] = []
    for number, line in enumerate(text.split("\n")):
        before = lines[-1] if lines else ""
        ends = before.strip() and not before.startswith((" ", "#")) and not re.match(r"[-*] |\d+\. |\|", before)
        if _BEGINS.match(line) and (ends or (after_code and number == 1)):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def resolved(page: str, link: str) -> str | None:
    """The path in the repository that a page's relative link leads to; None if there is nothing."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def uri_of(path: str) -> str:
    """The source URI on the site of a file or folder of the repository."""
    uri = "index.md" if path == HOME else path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{uri}/README.md" if (ROOT / path / "README.md").is_file() else f"{uri}/index.md"
    return uri if path.startswith("docs/") or uri.endswith(".md") else f"{uri}.md"


def _targets(page: str) -> list[str]:
    prose = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [path for match in _LINK.finditer(prose) if (path := resolved(page, match[2])) is not None]


def _add(path: str, files: Files, config: MkDocsConfig) -> None:
    source, uri = ROOT / path, uri_of(path)
    _repository_path[uri] = path if not source.is_dir() else f"{path}/README.md"
    if source.is_dir():
        text = _index_of(path)
    elif source.suffix == ".md":
        text = source.read_text(encoding="utf-8")
    else:
        text = f"# {path}\n\n````{LANGUAGES.get(source.suffix, 'text')}\n{source.read_text(encoding='utf-8')}````\n"
    file = File.generated(config, uri, content=text)
    if source.suffix != ".md":
        file.inclusion = InclusionLevel.NOT_IN_NAV
    files.append(file)


def _index_of(folder: str) -> str:
    """A page that lists the files of a folder, by the first line of each."""
    lines = [f"# {folder}", ""]
    for path in sorted((ROOT / folder).iterdir()):
        if path.suffix in (".md", ".py") and not path.name.startswith("__"):
            first = path.read_text(encoding="utf-8").split("\n", 1)[0].strip('# "')
            lines.append(f"- [{first}]({path.name})")
    return "\n".join(lines) + "\n"
