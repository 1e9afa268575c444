"""Waiting for a page of a real browser: its commands may answer before the page that they ask for is shown."""

PATIENCE_S = 20


def until(driver, true):
    """What true(driver) gives once it is true. A page that is just being left may refuse to answer: asked again."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, PATIENCE_S, 0.02, [WebDriverException]).until(true)


def drawn(driver) -> bool:
    """A page that has run its scripts, and not the one that is being left."""
    return driver.execute_script("return document.readyState === 'complete' && !window.left")


def leave(driver):
    driver.execute_script("window.left = true")


def goes_on_when_drawn(driver):
    """get and refresh of a busy browser may return while the page before is still shown: these wait for the new one."""

    def after(step):
        def go(*arguments):
            leave(driver)
            step(*arguments)
            until(driver, drawn)

        return go

    driver.get, driver.refresh = after(driver.get), after(driver.refresh)
