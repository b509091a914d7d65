"""Check digits of cards and identity numbers. Digits in, true or false out. Pure, any thread.

Each function takes the digits alone as bytes, without separators, of the length that its number has.
"""

from __future__ import annotations

import calendar
import operator

# Year of birth is taken to lie in the range in which living people, and their grandparents, were born.
YEARS = range(1900, 2031)
_PROVINCES = frozenset(
    [11, 12, 13, 14, 15, 21, 22, 23, 31, 32, 33, 34, 35, 36, 37, 41, 42, 43, 44, 45, 46, 50, 51, 52, 53, 54, 61, 62, 63, 64, 65]
    + [71, 81, 82, 83]
)
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
# The dihedral group of order ten, and Verhoeff's permutations of the digits by their place.
_D5 = tuple(
    tuple(map(int, row)) for row in (
        "0123456789", "1234067895", "2340178956", "3401289567", "4012395678",
        "5987604321", "6598710432", "7659821043", "8765932104", "9876543210",
    )
)  # fmt: skip
_VERHOEFF = tuple(
    tuple(map(int, row)) for row in (
        "0123456789", "1576283094", "5803796142", "8916043527", "9453126870",
        "4286573901", "2793806415", "7046913258",
    )
)  # fmt: skip
_CF_ODD = dict(
    zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18,
        20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23), strict=True)
)  # fmt: skip
_CURP = "0123456789ABCDEFGHIJKLMNÑOPQRSTUVWXYZ"


def _weighted(digits: bytes, weights: tuple[int, ...]) -> int:
    """The sum of each digit times its weight, as many of the one as of the other."""
    return sum(map(operator.mul, digits, weights)) - 48 * sum(weights)


def is_date(year: int, month: int, day: int) -> bool:
    return year in YEARS and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]


def is_short_date(six: bytes) -> bool:
    """YYMMDD in one of two centuries."""
    year, month, day = int(six[:2]), int(six[2:4]), int(six[4:6])
    return is_date(1900 + year, month, day) or is_date(2000 + year, month, day)


def luhn(digits: bytes) -> bool:
    total = sum(digits[-1::-2]) - 48 * len(digits[-1::-2])
    return (total + sum(_DOUBLED[digit - 48] for digit in digits[-2::-2])) % 10 == 0


def chinese(number: bytes) -> bool:
    """18 characters: province, birthday, order, and ISO 7064 MOD 11-2."""
    if int(number[:2]) not in _PROVINCES or not is_date(int(number[6:10]), int(number[10:12]), int(number[12:14])):
        return False
    total = _weighted(number[:17], (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2))
    return b"10X98765432"[total % 11] == number[17:].upper()[0]


def verhoeff(digits: bytes) -> bool:
    check = 0
    for place, digit in enumerate(reversed(digits)):
        check = _D5[check][_VERHOEFF[place % 8][digit - 48]]
    return check == 0


def spanish(number: bytes) -> bool:
    """DNI `12345678Z` or NIE `X1234567L`."""
    number = number.upper()
    digits = number[:-1].replace(b"X", b"0").replace(b"Y", b"1").replace(b"Z", b"2")
    return b"TRWAGMYFPDXBNJZSQVHLCKE"[int(digits) % 23] == number[-1]


def brazilian(digits: bytes) -> bool:
    """CPF, 11 digits."""
    if len(set(digits)) == 1:
        return False
    first = _weighted(digits[:9], tuple(range(10, 1, -1))) * 10 % 11 % 10
    second = _weighted(digits[:10], tuple(range(11, 1, -1))) * 10 % 11 % 10
    return (first, second) == (digits[9] - 48, digits[10] - 48)


def french(number: bytes) -> bool:
    """NIR, 13 digits (2A or 2B for Corsica) and a key of two."""
    month = int(number[3:5])
    if number[:1] not in b"12378" or not (1 <= month <= 12 or 20 <= month <= 42 or 50 <= month <= 99):
        return False
    digits = number.upper().replace(b"2A", b"19").replace(b"2B", b"18")
    return 97 - int(digits[:13]) % 97 == int(digits[13:])


def italian(number: bytes) -> bool:
    """Codice fiscale, 16 characters."""
    text = number.decode("ascii").upper()
    total = sum(_CF_ODD[char] for char in text[0:15:2])
    total += sum(int(char) if char.isdigit() else ord(char) - 65 for char in text[1:15:2])
    return chr(65 + total % 26) == text[15]


def mexican(number: bytes) -> bool:
    """CURP, 18 characters."""
    text = number.decode("ascii").upper()
    total = sum(_CURP.index(char) * (18 - place) for place, char in enumerate(text[:17]))
    return text[17] == str(-total % 10) and is_short_date(number[4:10])


def polish(digits: bytes) -> bool:
    """PESEL, 11 digits; the month carries the century."""
    century = {0: 1900, 1: 2000, 2: 2100, 3: 2200, 4: 1800}[int(digits[2:4]) // 20]
    total = _weighted(digits, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1))
    return total % 10 == 0 and is_date(century + int(digits[:2]), int(digits[2:4]) % 20, int(digits[4:6]))


def dutch(digits: bytes) -> bool:
    """BSN, 9 digits."""
    return _weighted(digits, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0 and digits != b"000000000"


def german(digits: bytes) -> bool:
    """Steuer-Identifikationsnummer, 11 digits, ISO 7064 MOD 11,10."""
    product = 10
    for digit in digits[:10]:
        total = (digit - 48 + product) % 10 or 10
        product = total * 2 % 11
    return digits[0] != 48 and (11 - product) % 10 == digits[10] - 48


def turkish(digits: bytes) -> bool:
    """T.C. Kimlik No, 11 digits."""
    odd, even = _weighted(digits[0:9:2], (1,) * 5), _weighted(digits[1:8:2], (1,) * 4)
    tenth = (odd * 7 - even) % 10
    return digits[0] != 48 and tenth == digits[9] - 48 and (odd + even + tenth) % 10 == digits[10] - 48


def south_african(digits: bytes) -> bool:
    """13 digits: birthday, order, and Luhn."""
    return luhn(digits) and is_short_date(digits[:6])


def japanese(digits: bytes) -> bool:
    """My Number, 12 digits."""
    total = _weighted(digits[:11], (6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    return (0 if total <= 1 else 11 - total) == digits[11] - 48


def swiss(digits: bytes) -> bool:
    """AHV, 13 digits beginning 756, EAN-13."""
    return _weighted(digits, (1, 3) * 6 + (1,)) % 10 == 0


def belgian(digits: bytes) -> bool:
    """Rijksregisternummer, 11 digits."""
    for century in (0, 2_000_000_000):
        if 97 - (century + int(digits[:9])) % 97 == int(digits[9:]):
            return True
    return False


def hong_kong(letters: bytes, digits: bytes, check: bytes) -> bool:
    """HKID: one or two letters, six digits, check character."""
    text = letters.upper().rjust(2, b" ")
    total = sum(weight * (36 if char == 32 else char - 55) for weight, char in zip((9, 8), text, strict=True))
    total += _weighted(digits, (7, 6, 5, 4, 3, 2))
    return (total + (10 if check in b"Aa" else int(check))) % 11 == 0


def taiwanese(letter: int, digits: bytes) -> bool:
    """A letter (upper case) and nine digits."""
    code = b"ABCDEFGHJKLMNPQRSTUVXYWZIO".index(letter) + 10
    return (code // 10 + code % 10 * 9 + _weighted(digits, (8, 7, 6, 5, 4, 3, 2, 1, 1))) % 10 == 0


def singaporean(first: int, digits: bytes, last: int) -> bool:
    """NRIC or FIN: a letter of STFGM (upper case), seven digits, a letter."""
    total = _weighted(digits, (2, 7, 6, 5, 4, 3, 2)) + {84: 4, 71: 4, 77: 3}.get(first, 0)
    if first == 77:
        return b"KLJNPQRTUWX"[10 - total % 11] == last
    return (b"JZIHGFEDCBA" if first in b"ST" else b"XWUTRQPNMLK")[total % 11] == last


def finnish(six: bytes, rest: bytes) -> bool:
    """HETU: DDMMYY, a century sign (not given), three digits and a check character in `rest`."""
    day, month, year = int(six[:2]), int(six[2:4]), int(six[4:6])
    dated = is_date(1900 + year, month, day) or is_date(2000 + year, month, day)
    return dated and b"0123456789ABCDEFHJKLMNPRSTUVWXY"[int(six + rest[:3]) % 31] == rest[3:].upper()[0]


def swedish(digits: bytes) -> bool:
    """Personnummer, ten digits: birthday (day + 60 for a coordination number), order, Luhn."""
    day = int(digits[4:6])
    dated = is_short_date(digits[:4] + b"%02d" % (day - 60 if day > 60 else day))
    return dated and luhn(digits)


def korean(digits: bytes) -> bool:
    """RRN, 13 digits: birthday with a century digit. Those given out since October 2020 have no check digit."""
    return is_short_date(digits[:6]) and digits[6] in b"12345678"
