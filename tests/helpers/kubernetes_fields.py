"""Fields of Kubernetes resources that examples may have, taken from published schemas.

`kubernetes_fields.json` keeps what `fields_of` returns for the resources in docs/containers, with
the files that the schemas come from. After a change of an example, in the sources of the operators:

    python -m tests.helpers.kubernetes_fields docs/containers/mpijob.yaml CRD.yaml ...
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KNOWN = Path(__file__).with_name("kubernetes_fields.json")


def resources_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def fields_of(value: Any, schema: dict[str, Any], place: str = "") -> dict[str, dict[str, Any]]:
    """Return, for each mapping in a resource, the types of its fields and those it must have.

    Below `metadata` of the resource and where any field is allowed nothing is checked.
    """
    if isinstance(value, list):
        parts = [fields_of(item, schema["items"], f"{place}[]") for item in value]
    elif isinstance(value, dict) and "additionalProperties" in schema:
        inner = schema["additionalProperties"]
        parts = [fields_of(item, inner, f"{place}.{key}") for key, item in value.items()]
    elif isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        types = {name: _type_of(field) for name, field in sorted(fields.items())}
        parts = [{place: {"fields": types, "required": schema.get("required", [])}}]
        parts += [
            fields_of(item, fields[key], f"{place}.{key}")
            for key, item in value.items()
            if key in fields
        ]
    else:
        parts = []
    return {name: rule for part in parts for name, rule in part.items()}


def _type_of(schema: dict[str, Any]) -> Any:
    return schema.get("enum") or schema.get("type", "")


def problems_of(value: Any, rules: dict[str, dict[str, Any]], place: str = "") -> list[str]:
    """Return what the rules of `fields_of` do not allow in a resource."""
    if isinstance(value, list):
        return [text for item in value for text in problems_of(item, rules, f"{place}[]")]
    if not isinstance(value, dict):
        return []
    problems = []
    if place in rules:
        fields = rules[place]["fields"]
        problems += [f"{place}.{n} is missing" for n in rules[place]["required"] if n not in value]
        problems += [f"{place}.{name} is unknown" for name in value if name not in fields]
        problems += [
            f"{place}.{name}={item!r} is no {fields[name]}"
            for name, item in value.items()
            if name in fields and not _fits(item, fields[name])
        ]
    for key, item in value.items():
        problems += problems_of(item, rules, f"{place}.{key}")
    return problems


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return value in kind
    types = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    return kind not in types or type(value) is types[kind]


def main(example: str, *schemas: str) -> None:
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    found = {}
    for path in schemas:
        definition = yaml.safe_load(Path(path).read_text())["spec"]
        for version in definition["versions"]:
            kind = f"{definition['group']}/{version['name']} {definition['names']['kind']}"
            found[kind] = version["schema"]["openAPIV3Schema"]
    for resource in resources_of(Path(example)):
        kind = f"{resource['apiVersion']} {resource['kind']}"
        known.setdefault(kind, {"source": ""})["rules"] = fields_of(resource, found[kind])
    # A line for each mapping.
    KNOWN.write_text(json.dumps(known, sort_keys=True).replace('}, "', '},\n"') + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
