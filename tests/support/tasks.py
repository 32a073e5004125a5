"""Background tasks of the service, identified by their names."""

import asyncio


async def ended(name: str) -> None:
    """Wait for the tasks whose names begin with `name`."""
    if tasks := [task for task in asyncio.all_tasks() if task.get_name().startswith(name)]:
        await asyncio.wait(tasks)
