"""Accessibility checks of the page: names, roles and text contrast."""

from typing import Any

from tests.browser.page import Page

NAMED = {
    *("button", "checkbox", "combobox", "dialog", "grid", "heading", "image", "link", "listbox", "menuitem", "option"),
    *("radio", "searchbox", "slider", "spinbutton", "switch", "tab", "table", "tabpanel", "textbox"),
}
"""Roles of elements that need a name."""
FAINT = """
const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = color => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
};
const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
    for (; element; element = element.parentElement) {
        const [r, g, b, a] = rgba(getComputedStyle(element).backgroundColor);
        if (a > 250) return [r, g, b];
    }
    return [255, 255, 255];
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest("[disabled], [aria-disabled=true], [aria-hidden=true], script, style")) continue;
    const style = getComputedStyle(element), back = behind(element), [r, g, b, a] = rgba(style.color);
    const front = [r, g, b].map((c, i) => (c * a + back[i] * (255 - a)) / 255);
    const [high, low] = [luminance(front), luminance(back)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.5 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (isLarge ? 3 : 4.5)) faint.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return [...new Set(faint)];
"""
"""Check WCAG 2.2, success criterion 1.4.3. The script ignores backgrounds that are pictures or partly transparent."""


async def _nodes(page: Page) -> list[tuple[str, str]]:
    tree: dict[str, Any] = await page.command("Accessibility.getFullAXTree")
    return [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in tree["nodes"]
        if not node["ignored"] and "role" in node
    ]


async def roles(page: Page) -> dict[str, list[str]]:
    """Return the names of the elements by role, in the order of the page."""
    found: dict[str, list[str]] = {}
    for role, name in await _nodes(page):
        found.setdefault(role, []).append(name)
    return found


async def nameless(page: Page) -> list[str]:
    """Return the roles of the elements that need a name and have none."""
    return [role for role, name in await _nodes(page) if role in NAMED and not name]


async def faint_texts(page: Page) -> list[str]:
    """Return the texts whose contrast to their background is too low, each with its contrast ratio."""
    faint: list[str] = await page.run(FAINT)
    return faint
