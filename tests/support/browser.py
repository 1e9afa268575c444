"""A person at a page in Chromium: what they press, see and reach."""

import json


def look(driver, width, dark=False, height=900):
    """Another window and colour scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def find(driver, selector):
    return driver.find_element("css selector", selector)


def press(driver, *keys):
    """Keys go to whatever has the focus, as a person's do."""
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        driver.switch_to.active_element.send_keys(getattr(Keys, key, key))


def tab_through(driver, times):
    """Each element that gets the focus by so many Tabs; that it has it must be seen."""
    for _ in range(times):
        press(driver, "TAB")
        element = driver.switch_to.active_element
        outline = [element.value_of_css_property(f"outline-{part}") for part in ("style", "width")]
        if element.tag_name != "body":
            assert outline[0] != "none" and outline[1] != "0px", element.get_attribute("outerHTML")[
                :80
            ]
            yield element


def tab_to(driver, selector, most=40):
    """Press Tab until the element has the focus: it can be reached with the keyboard alone."""
    wanted = find(driver, selector)
    for _ in range(most):
        if driver.switch_to.active_element == wanted:
            return wanted
        press(driver, "TAB")
    raise AssertionError(f"Tab does not reach {selector}")


def requests(driver):
    """Addresses that a page asked for since the log was last read: no data in the page itself, and no pictures of the
    browser's own empty tab, which may still be on their way when the page is opened."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    urls = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if not url.startswith(("data:", "chrome://"))]
