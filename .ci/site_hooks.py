"""Hooks of mkdocs: files outside docs/, Markdown as GitHub reads it, diagrams, and the check of public names.

A page in docs/ links to examples, sources and folders of the repository. On GitHub these links work as they are. The
site has no repository around it, so each linked file becomes a page below `source/`, and the links lead there.
GitHub draws Mermaid diagrams in the browser; the site has them as SVG, so that its pages need no script for them.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = "source"
"""Folder of the site with the pages of files outside docs/."""
LANGUAGES = {".json": "json", ".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files at the root that are pages of the navigation."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Head of a page that the search leaves out."""
PUBLIC = ("rollbus", "rollbus.sync", "rollbus.trainer")
"""Modules whose `__all__` must be on the API pages."""
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^\s*(```|~~~)")
LIST_ITEM = re.compile(r"([-*]|\d+\.) ")
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MERMAID_STYLE = '%%{init: {"theme": "neutral", "look": "classic", "fontFamily": "Verdana, DejaVu Sans"}}%%\n'
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.rollbus")


def is_external(link: str) -> bool:
    """Return True if a link has a scheme, or only an anchor."""
    return not link or "://" in link or link.startswith("mailto:")


def repository_path(link: str, source_path: str) -> str:
    """Return the path in the repository that a relative link in the file `source_path` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source_path), link))


def site_page(path: str) -> str | None:
    """Return the site's page for a path of the repository, or None if no file has this path."""
    if path == "docs" or path.startswith("docs/"):
        return posixpath.join(path.removeprefix("docs").removeprefix("/"), "")[:-1] or "index.md"
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    found = ROOT / path
    if not found.exists() or path.startswith(".."):
        return None
    if found.is_dir():
        return f"{SOURCE}/{path}/index.md" if path != "." else f"{SOURCE}/index.md"
    return f"{SOURCE}/{path}" if found.suffix == ".md" else f"{SOURCE}/{path}.md"


def outside_links(text: str, source_path: str) -> set[str]:
    """Return the paths outside docs/ that a Markdown text links to."""
    paths = {repository_path(link, source_path) for link, _ in LINK.findall(text) if not is_external(link)}
    return {path for path in paths if path != "docs" and not path.startswith("docs/")}


def rewrite(text: str, source_path: str, page_path: str) -> str:
    """Return Markdown whose links fit the page `page_path` of the site, with blank lines before lists."""
    base = posixpath.dirname(page_path)

    def replace(match: re.Match[str]) -> str:
        link, anchor = match.group(1), match.group(2) or ""
        if is_external(link):
            return match.group(0)
        path = repository_path(link, source_path)
        target = site_page(path)
        if target is None or (path.startswith("docs/") and source_path.startswith("docs/")):
            return match.group(0)
        is_code = target.startswith(f"{SOURCE}/") and not path.endswith(".md")
        return posixpath.relpath(target, base or ".") + ("" if is_code else anchor)

    lines: list[str] = []
    is_fenced = False
    for line in text.splitlines():
        if FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced:
            before = lines[-1] if lines else ""
            if LIST_ITEM.match(line) and before.strip() and not LIST_ITEM.match(before) and before[0] not in " <":
                lines.append("")
            line = LINK.sub(replace, line)  # noqa: PLW2901 - the line is rewritten in place
        lines.append(line)
    return "\n".join(lines) + "\n"


def file_page(path: str) -> str:
    """Return the Markdown page of a file or folder of the repository."""
    found = ROOT / path
    if found.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in found.iterdir() if entry.name[0] not in "._")
        return f"{UNSEARCHED}# {path}/\n\nA folder of the repository.\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = found.read_text()
    if found.suffix == ".md":
        return rewrite(text, path, site_page(path) or path)
    language = LANGUAGES.get(found.suffix, "text")
    return f"{UNSEARCHED}# {path}\n\nA file of the repository.\n\n````{language}\n{text}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and a page for each file outside docs/ that a page links to, directly or not."""
    due: set[str] = set()
    for path, page in ROOT_PAGES.items():
        text = (ROOT / path).read_text()
        files.append(File.generated(config, page, content=rewrite(text, path, page)))
        due |= outside_links(text, path)
    for file in files.documentation_pages():
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(DOCS):
            due |= outside_links(file.content_string, f"docs/{file.src_uri}")
    done = set(ROOT_PAGES)
    while due - done:
        path = (due - done).pop()
        done.add(path)
        target = site_page(path)
        if target is None:
            continue
        if path.endswith(".md"):
            due |= outside_links((ROOT / path).read_text(), path)
        content = file_page(path)
        files.append(File.generated(config, target, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files outside docs/ to their pages, and draw the diagrams."""
    if page.file.generated_by:
        return markdown
    return with_diagrams(rewrite(markdown, f"docs/{page.file.src_uri}", page.file.src_uri))


def with_diagrams(markdown: str) -> str:
    """Return Markdown with an SVG in place of each Mermaid block. Each SVG has its own id, which its styles name."""
    number = 0

    def draw(block: re.Match[str]) -> str:
        nonlocal number
        number += 1
        svg = mmdr.render(MERMAID_STYLE + block.group(1)).svg().replace("merman", f"diagram-{number}")
        return f'<div class="diagram">{" ".join(svg.split())}</div>'

    return MERMAID.sub(draw, markdown)


def on_env(env: Any, config: Any, **_: Any) -> Any:
    """Check the public names in the modules that mkdocstrings has read for the pages."""
    python = config.plugins["mkdocstrings"].get_handler("python")
    for problem in undocumented(python.collect("rollbus", python.get_options({}))):
        log.warning(problem)
    return env


def undocumented(package: Any) -> list[str]:
    """Return one sentence for each public name without a docstring, and for each that no API page has."""
    shown: set[str] = set()
    for page in sorted((DOCS / "api").glob("*.md")):
        shown |= set(DIRECTIVE.findall(page.read_text()))
    problems: list[str] = []
    for module in PUBLIC:
        found = package if module == "rollbus" else package[module.removeprefix("rollbus.")]
        listed = (package["bus"] if module == "rollbus" else found).exports or []
        problems += [
            f"{module}.{name} is on no page of docs/api: add `::: {module}.{name}` to one"
            for name in sorted(map(str, listed))
            if not shown & {f"{module}.{name}", f"{module}.{name}.{name}"}
        ]
    for path in sorted(shown):
        problems += missing_docstrings(package[path.removeprefix("rollbus.")], path)
    return problems


def missing_docstrings(found: Any, path: str) -> list[str]:
    """Return one sentence for a name, and each public method or field of it, that has no docstring."""
    found = found.final_target if found.is_alias else found
    problems = [] if found.docstring else [f"{path} has no docstring"]
    if not (found.is_class or found.is_module):
        return problems
    sections = found.docstring.parse("google") if found.docstring else []
    listed = {item.name for section in sections if section.kind == "attributes" for item in section.value}
    if found.is_class:
        listed |= {name for base in found.mro() for name, member in base.members.items() if member.docstring}
    for name, member in found.members.items():
        if name.startswith("_") or member.is_alias or (found.is_module and found.exports and name not in found.exports):
            continue
        if member.is_class and found.is_module:
            problems += missing_docstrings(member, f"{path}.{name}")
        elif (
            member.is_function or (member.is_attribute and found.is_class and name not in listed)
        ) and not member.docstring:
            problems.append(f"{path}.{name} has no docstring ({member.filepath}:{member.lineno})")
    return problems


def on_page_context(context: Any, page: Any, **_: Any) -> Any:
    """Leave generated pages without a link to edit them."""
    if page.file.generated_by:
        page.edit_url = None
    return context
