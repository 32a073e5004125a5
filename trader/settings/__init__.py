"""Settings: one frozen struct, read once at start from the environment and the `.env` file.

Read `settings.py` for the fields, `forms.py` for the text that each accepts, and `checks.py` for contradictions
between them.
"""
