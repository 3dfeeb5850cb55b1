"""Ready-made connections of mlacast to model libraries; each one is imported by name, on demand.

``mlacast.integrations.transformers`` runs the attention of a Hugging Face DeepSeek-V4 model through
the core ops. Importing this package imports none of those libraries.
"""
