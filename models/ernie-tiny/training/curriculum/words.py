"""Word lists that several task families draw from, and words made up where new ones are needed."""

from __future__ import annotations

from random import Random


def split_words(text: str) -> tuple[str, ...]:
    """One word per item, in the order written."""
    return tuple(text.split())


ANIMALS = split_words(
    "ant bear bee bird cat cow crab crow deer dog duck eagle fish fox frog goat goose hen horse "
    "lion lizard mole monkey moth mouse otter owl panda parrot pig rabbit rat seal shark sheep "
    "snail snake spider squid swan tiger turtle whale wolf worm zebra"
)
FRUITS = split_words(
    "apple apricot banana blueberry cherry coconut date fig grape guava kiwi lemon lime mango "
    "melon nectarine olive orange papaya peach pear plum quince raspberry strawberry"
)
THINGS = split_words(
    "anchor bag ball basket bell book bottle bowl box bridge brush bucket button candle card chair "
    "clock coat coin cup desk door drum fan flag fork glass glove hammer hat jar kettle key knife "
    "ladder lamp leaf letter map mirror nail needle net oar paper pen pencil phone pillow plate "
    "pot ring rope ruler scarf shell shoe shovel soap spoon stamp stone table tent ticket towel "
    "toy umbrella vase violin wagon wallet watch wheel whistle window wire"
)
COLOURS = split_words(
    "black blue brown gold gray green orange pink purple red silver violet white yellow"
)
ADJECTIVES = split_words(
    "big brave bright calm clean cold dark deep dry early empty fast gentle happy heavy kind large "
    "late lazy light little long loud new old proud quick quiet rich round sharp short shy slow "
    "small soft strong sweet tall thin tiny warm wet wide wild wise young"
)
VERBS = split_words(
    "asks bakes brings builds buys carries catches cleans counts cuts draws drops finds fixes "
    "follows gives hears helps hides holds keeps leaves lifts likes loses makes meets moves opens "
    "paints pulls pushes reads sees sells sends shows takes throws turns wants washes watches wins"
)
PLACES = split_words(
    "attic beach bridge cabin castle cave city desert farm field forest garden harbor hill house "
    "island kitchen lake library market meadow mill mountain museum office park pond river road "
    "school shop station street tower valley village yard"
)
FIRST_NAMES = split_words(
    "Ada Alice Amir Anna Ben Bella Carl Chloe Clara Daniel Diana Ella Emma Eric Eva Felix Fiona "
    "Frank Grace Hana Henry Hugo Ida Ivan Jack Jane Jonas Julia Karl Kate Kim Laura Leo Li Lily "
    "Lucas Maria Mark Maya Mei Mia Milo Nadia Nina Noah Olga Omar Oscar Paul Peter Rosa Ruth Sam "
    "Sara Simon Sofia Tara Theo Tom Vera Victor Wei Yuki Zoe"
)
LAST_NAMES = split_words(
    "Adams Baker Bell Berg Brown Chen Clark Cole Cruz Diaz Evans Fischer Ford Garcia Gray "
    "Hall Hill Hughes Ivanov Jones Kim King Klein Lee Lopez Martin Meyer Miller Moore "
    "Morris Nguyen Novak Olsen Park Parker Patel Reed Rossi Sato Scott Silva Singh Smith "
    "Stone Tanaka Taylor Turner Walker Wang Weber White Wood Wright Young Zhang"
)
JOBS = split_words(
    "actor artist baker barber builder butcher carpenter chef clerk dancer dentist doctor driver "
    "engineer farmer gardener judge lawyer librarian mechanic nurse painter pilot plumber poet "
    "sailor singer tailor teacher waiter writer"
)
CITIES = (
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
    "Tel Aviv",
    *split_words(
        "Amsterdam Athens Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest "
        "Cairo Chicago Dallas Delhi Denver Dublin Geneva Hamburg Hanoi Helsinki Houston "
        "Istanbul Jakarta Lagos Lima Lisbon London Madrid Manila Miami Milan Moscow Mumbai "
        "Munich Nairobi Oslo Osaka Paris Prague Rome Seattle Seoul Shanghai Shenzhen Singapore "
        "Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich"
    ),
)
MONTHS = split_words(
    "January February March April May June July August September October November December"
)
WEEKDAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
HOBBIES = split_words(
    "chess cooking cycling dancing drawing fishing gardening hiking knitting painting reading "
    "running sailing singing skating skiing swimming tennis"
)
ALL_WORDS = tuple(
    sorted({*ANIMALS, *FRUITS, *THINGS, *COLOURS, *ADJECTIVES, *VERBS, *PLACES, *JOBS})
)
NOUNS = tuple(sorted({*ANIMALS, *FRUITS, *THINGS}))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
CHINESE_WORDS = split_words(
    "苹果 香蕉 老师 学生 朋友 早上 晚上 今天 明天 天气 中国 北京 上海 米饭 面条 手机 电脑 桌子 "
    "椅子 小猫 小狗 大象 老虎 白云 蓝天 月亮 太阳 星星 河流 高山 春天 夏天 秋天 冬天 红色 绿色"
)


def made_up_word(rng: Random, low: int = 1, high: int = 3) -> str:
    """A word that can be spoken but stands in no list: `low` to `high` syllables."""
    word = "".join(
        rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(low, high))
    )
    return word + rng.choice(CONSONANTS) if rng.random() < 0.5 else word


def made_up_name(rng: Random) -> str:
    """A capitalised made-up word."""
    return made_up_word(rng, 2, 3).capitalize()


def person(rng: Random) -> str:
    """A first and a last name; now and then one that is in no list."""
    first = made_up_name(rng) if rng.random() < 0.2 else rng.choice(FIRST_NAMES)
    last = made_up_name(rng) if rng.random() < 0.2 else rng.choice(LAST_NAMES)
    return f"{first} {last}"


def code(rng: Random) -> str:
    """A short code: digits, letters, or both."""
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 6)))
    if kind < 0.75:
        return (
            "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(3))
            + "-"
            + "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 4)))
        )
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}-{rng.randint(10, 99)}"
