"""GET /docs: the API as the server describes it in /openapi.json, as a page without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, Final

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>FastDeploy's API</title>
<link rel="icon" href="ui/icon.svg">
<link rel="stylesheet" href="ui/docs.css">
</head>
<body>
<h1>FastDeploy's API</h1>
<p>Version {version}. The same for programs: <a href="openapi.json">/openapi.json</a>.
A server with --api-key wants the key as <code>Authorization: Bearer KEY</code>.</p>
"""


def api_page(schema: dict[str, Any]) -> bytes:
    """The page for an OpenAPI description."""
    bodies = schema.get("components", {}).get("schemas", {})
    parts = [_HEAD.format(version=escape(schema["info"]["version"]))]
    routes = [
        (path, method, route)
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    parts.append("<ul>")
    for path, method, route in routes:
        name = f"{method.upper()} {path}"
        parts.append(f'<li><a href="#{escape(route["operationId"])}">{escape(name)}</a></li>')
    parts.append("</ul>")
    for path, method, route in routes:
        parts.append(f'<section id="{escape(route["operationId"])}">')
        parts.append(f"<h2><code>{escape(f'{method.upper()} {path}')}</code></h2>")
        parts.append(f"<p>{escape(route.get('description') or route.get('summary', ''))}</p>")
        rows = [*_parameters(route), *_fields(route, bodies)]
        if rows:
            parts.append("<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>")
            parts += [
                f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
            ]
            parts.append("</table>")
        parts.append("</section>")
    parts.append("</body>\n</html>\n")
    return "\n".join(parts).encode()


def _parameters(route: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for found in route.get("parameters", ()):
        shape = found.get("schema", {})
        yield found["name"], _kind(shape), _default(shape), f"in the {found['in']}"


def _fields(route: dict[str, Any], bodies: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    content = route.get("requestBody", {}).get("content", {})
    shape = content.get("application/json", {}).get("schema", {})
    shape = bodies.get(shape.get("$ref", "").rpartition("/")[2], shape)
    needed = shape.get("required", ())
    for name, field in shape.get("properties", {}).items():
        default = "required" if name in needed else _default(field)
        yield name, _kind(field), default, field.get("description", "")


def _default(shape: dict[str, Any]) -> str:
    return "" if shape.get("default") is None else str(shape["default"])


def _kind(shape: dict[str, Any]) -> str:
    """A type as one reads it."""
    if "$ref" in shape:
        return str(shape["$ref"].rpartition("/")[2])
    choices = shape.get("anyOf") or shape.get("oneOf") or ()
    if choices:
        return " or ".join(dict.fromkeys(k for k in map(_kind, choices) if k != "null"))
    if "enum" in shape or "const" in shape:
        return " | ".join(map(repr, shape.get("enum", [shape.get("const")])))
    if shape.get("type") == "array":
        return f"list of {_kind(shape.get('items', {}))}"
    kind = shape.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)
