# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as lists of actions, their simulation, and one executor."""
