"""JSON schemas before they are grammars: checked, closed, and blamed part by part."""
