"""The hardware that a plan can name, one file per kind. Absent hardware is reported as absent; it never
fails at import. What is known of hardware that need not be present is ``tessera_core.profile.catalogue``.
"""
