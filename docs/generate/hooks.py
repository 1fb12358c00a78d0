"""What MkDocs runs while it builds the site: generated pages, formulas, links that lead out of docs/."""

from __future__ import annotations

import html
import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import benchmark_page
import command_page
import example_pages
import leaderboard_page
import measure_pages
import measure_pictures
import networks_table
import notebook_pages
import reference_pages
import symmetry_matrix
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from flatscope.registry import declarations
from flatscope.reports.markup import formula_as_mathml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
log = logging.getLogger("mkdocs.flatscope")
# Files elsewhere in the repository that are pages of the site.
AT_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ELSEWHERE = AT_ROOT | {"benchmarks/RESULTS.md": "benchmarks.md"}
# Documents link to a page that only the site has by its name in this one, which can be read anywhere.
GENERATED = "docs/generated.md"
NAME = re.compile(r"(?<![\[`\w])`([a-z][a-z0-9_]*)`(?![`\]])")
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")  # address and anchor
# What a program printed, and the lines of it in which no two words stand further apart than by one space.
OUTPUT = re.compile(
    r'(<div class="(?:language-text )?highlight"><pre>(?:<span></span>)?<code>)(.*?)(</code>)', re.DOTALL
)
SENTENCE = re.compile(r"^\S+(?: \S+)*\n", re.MULTILINE)
# A formula that the converter could not read; it would stand on the page as its source.
UNREAD = '<code class="tex">'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The address of the repository; a script of our own for searching a site that is opened as files.

    Not as `repo_url`: the theme would ask that host for stars and releases whenever a page is opened.
    """
    home = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    config.extra["repository"] = home
    config.extra["social"] = [{"icon": "material/source-branch", "link": home, "name": "Repository"}]
    config.extra["polyfills"] = [url for url in config.extra.get("polyfills", ()) if not url.startswith("https:")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every page that is made from code, data or files elsewhere in the repository."""
    pages: dict[str, str] = dict(measure_pages.pages())
    pages["networks.md"] = networks_table.page(networks_table.known())
    pages["symmetries.md"] = symmetry_matrix.page(symmetry_matrix.known())
    pages["commands.md"] = command_page.page()
    pages |= dict(example_pages.pages())
    pages |= dict(reference_pages.pages())
    pages["benchmarks.md"] = benchmark_page.page()
    pages["leaderboard.md"] = leaderboard_page.page()
    pages |= {target: (ROOT / source).read_text(encoding="utf-8") for source, target in AT_ROOT.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    made = {**benchmark_page.pictures(), **notebook_pages.pictures(), **leaderboard_page.pages()}
    for path, picture in {**made, **dict(measure_pictures.pictures())}.items():
        files.append(File.generated(config, path, content=picture))
    for path, text in notebook_pages.pages():
        files.append(File.generated(config, path, content=text))
    _fill_navigation(config.nav, sorted(file.src_uri for file in files.documentation_pages()))
    return files


def _fill_navigation(entries: Any, pages: list[str]) -> None:
    """Replace an entry `folder/*` by the pages of that folder which no other entry names; measures by family."""
    named = set(re.findall(r"'([^']+\.md)'", repr(entries)))
    for entry in entries:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if not isinstance(below, list):
                continue
            _fill_navigation(below, pages)
            wanted = [item for item in below if isinstance(item, str) and item.endswith("/*")]
            for item in wanted:
                folder = item.removesuffix("*")
                found = [page for page in pages if page.startswith(folder) and page not in named]
                place = below.index(item)
                below[place : place + 1] = measure_pages.by_family().get(folder, found)
            entry[title] = below


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository that are no part of docs/ lead to the site's copy or to the repository."""
    if page.file.src_uri == "reference.md":
        markdown = reference_pages.overview(markdown)
    source = AT_ROOT_SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if (ROOT / source).is_file():
        markdown = with_names_linked(markdown, page.file.src_uri)

    def other(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:", target):
            return match[0]
        path, after = os.path.normpath(os.path.join(os.path.dirname(source), target)), match[3]
        if path == GENERATED and after.startswith("#"):
            path, after = f"docs/{after.lstrip('#').rstrip(')')}.md", ")"
        elif path.startswith("docs/") and source.startswith("docs/"):
            return match[0]
        inside = ELSEWHERE.get(path, path.removeprefix("docs/"))
        if path != GENERATED and files.get_file_from_path(inside) is not None:
            return match[1] + os.path.relpath(inside, os.path.dirname(page.file.src_uri) or ".") + after
        if (ROOT / path).exists():
            return f"{match[1]}{config.extra['repository']}/blob/main/{path}{match[3]}"
        return match[0]

    return LINK.sub(other, markdown)


def with_names_linked(markdown: str, place: str) -> str:
    """Names of measures and bounds lead to their pages, which only the site has; not in code or headings."""
    pages = {name: f"{kind}s/{name}.md" for kind in ("bound", "measure") for name in declarations(kind)}

    def linked(match: re.Match[str]) -> str:
        target = pages.get(match[1])
        return f"[{match[0]}]({os.path.relpath(target, os.path.dirname(place) or '.')})" if target else match[0]

    parts = re.split(r"(^```.*?^```|^#[^\n]*$|\[[^\]]*\]\([^)]*\))", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if n % 2 else NAME.sub(linked, part) for n, part in enumerate(parts))


AT_ROOT_SOURCES = {target: source for source, target in AT_ROOT.items()} | {"benchmarks.md": "benchmarks/RESULTS.md"}


def on_page_content(html_text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers draw without any script; names that break after their underscores."""

    def drawn(match: re.Match[str]) -> str:
        tag, source = match[1], html.unescape(match[2]).strip()
        block = source.startswith("\\[")
        made = str(formula_as_mathml(" ".join(source[2:-2].split())))
        if made.startswith(UNREAD):
            log.warning("%s: formula that cannot be read: %s", page.file.src_uri, source)
        if block:
            made = made.replace("<math", '<math display="block"', 1)
        return f'<{tag} class="arithmatex">{made}</{tag}>'

    html_text = re.sub(
        r"<code>(\w+)</code>", lambda name: f'<code class="name">{name[1].replace("_", "_<wbr>")}</code>', html_text
    )
    html_text = OUTPUT.sub(_broken_as_text, html_text)
    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', drawn, html_text, flags=re.DOTALL)


def _broken_as_text(block: re.Match[str]) -> str:
    """Printed sentences as lines that may break; code, whose words are coloured, stays as it is."""
    return block[0] if "<span" in block[2] else block[1] + SENTENCE.sub(_wrapped, block[2]) + block[3]


def _wrapped(line: re.Match[str]) -> str:
    """A line of printed text that is a sentence may break; the lines of a table may not."""
    return f'<span class="sentence">{line[0]}</span>' if len(html.unescape(line[0])) > 60 else line[0]
