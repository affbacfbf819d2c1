"""Hooks of MkDocs, so that what works in the source tree works in the site too.

Pages link to each other, to README.md and to files of the project by relative paths. README.md,
CONTRIBUTING.md and CHANGELOG.md are pages of the site; any other file outside docs/ that a page
links to (plots, sources) is copied into it; a folder is named, not linked.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SOURCES = {site: source for source, site in PAGES.items()}
ROLE = re.compile(r":(\w+):<code>~?(?:\w+\.)*(\w+)</code>")
LINK = re.compile(r"(!?\[[^\[\]]*\])\(([^()\s#]+)((?:#[^()\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are outside docs/."""
    files.remove(files.get_file_from_path("site.py"))
    for source, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        text = Path(page.abs_src_path).read_text(encoding="utf-8")
        for _, target, _ in LINK.findall(text):
            path = _in_project(page.src_uri, target)
            if (ROOT / path).is_file() and _in_site(path) not in files.src_uris:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the site."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = _in_project(page.file.src_uri, target)
        if not (ROOT / path).exists():
            return match.group()
        if (ROOT / path).is_dir():
            return text[1:-1]
        return f"{text}({posixpath.relpath(_in_site(path), posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names as prose has them, where docstrings have a role: ``:meth:`step``` is ``step()``."""
    return ROLE.sub(lambda role: f"<code>{role[2]}{'()' if role[1] in ('meth', 'func') else ''}</code>", html)


def _in_project(page: str, target: str) -> str:
    """What a link on a page of the site means, as a path from the project's root."""
    source = SOURCES.get(page, f"docs/{page}")
    return os.path.normpath(posixpath.join(posixpath.dirname(source), target))


def _in_site(path: str) -> str:
    return PAGES.get(path, path.removeprefix("docs/"))
