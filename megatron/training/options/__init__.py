# SPDX-License-Identifier: Apache-2.0
"""From a schema of dataclasses to the command line, YAML files, help and completion."""
