"""The examples in README and docs run, and their links lead somewhere."""

import re

import pytest
from pages import OF_FRAMEWORKS, PAGES, run_examples


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_FRAMEWORKS], ids=lambda page: page.name)
def test_examples_run(page):
    run_examples(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
