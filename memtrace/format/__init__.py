"""The trace on disk: schema, manifest, and parts. The only package that all others may import."""
