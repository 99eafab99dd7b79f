"""The small tables of facts the model learns by heart."""

from __future__ import annotations

from typing import NamedTuple


class Country(NamedTuple):
    """A country with what is asked about it; the Chinese names are empty where none is taught."""

    name: str
    capital: str
    continent: str
    language: str
    currency: str
    name_zh: str = ""
    capital_zh: str = ""


def _rows(text: str) -> tuple[Country, ...]:
    """Read one country per line, fields parted by `|`."""
    return tuple(
        Country(*(part.strip() for part in line.split("|"))) for line in text.strip().splitlines()
    )


COUNTRIES = _rows("""
Argentina|Buenos Aires|South America|Spanish|peso|阿根廷|布宜诺斯艾利斯
Australia|Canberra|Oceania|English|Australian dollar|澳大利亚|堪培拉
Austria|Vienna|Europe|German|euro|奥地利|维也纳
Bangladesh|Dhaka|Asia|Bengali|taka
Belgium|Brussels|Europe|Dutch|euro|比利时|布鲁塞尔
Bolivia|Sucre|South America|Spanish|boliviano
Brazil|Brasilia|South America|Portuguese|real|巴西|巴西利亚
Bulgaria|Sofia|Europe|Bulgarian|euro
Cambodia|Phnom Penh|Asia|Khmer|riel|柬埔寨|金边
Canada|Ottawa|North America|English|Canadian dollar|加拿大|渥太华
Chile|Santiago|South America|Spanish|peso|智利|圣地亚哥
China|Beijing|Asia|Chinese|yuan|中国|北京
Colombia|Bogota|South America|Spanish|peso|哥伦比亚|波哥大
Croatia|Zagreb|Europe|Croatian|euro
Cuba|Havana|North America|Spanish|peso|古巴|哈瓦那
Czechia|Prague|Europe|Czech|koruna|捷克|布拉格
Denmark|Copenhagen|Europe|Danish|krone|丹麦|哥本哈根
Ecuador|Quito|South America|Spanish|dollar
Egypt|Cairo|Africa|Arabic|pound|埃及|开罗
Estonia|Tallinn|Europe|Estonian|euro
Ethiopia|Addis Ababa|Africa|Amharic|birr
Finland|Helsinki|Europe|Finnish|euro|芬兰|赫尔辛基
France|Paris|Europe|French|euro|法国|巴黎
Germany|Berlin|Europe|German|euro|德国|柏林
Ghana|Accra|Africa|English|cedi
Greece|Athens|Europe|Greek|euro|希腊|雅典
Hungary|Budapest|Europe|Hungarian|forint|匈牙利|布达佩斯
Iceland|Reykjavik|Europe|Icelandic|krona|冰岛|雷克雅未克
India|New Delhi|Asia|Hindi|rupee|印度|新德里
Indonesia|Jakarta|Asia|Indonesian|rupiah|印度尼西亚|雅加达
Iran|Tehran|Asia|Persian|rial|伊朗|德黑兰
Iraq|Baghdad|Asia|Arabic|dinar|伊拉克|巴格达
Ireland|Dublin|Europe|English|euro|爱尔兰|都柏林
Italy|Rome|Europe|Italian|euro|意大利|罗马
Japan|Tokyo|Asia|Japanese|yen|日本|东京
Jordan|Amman|Asia|Arabic|dinar
Kenya|Nairobi|Africa|Swahili|shilling|肯尼亚|内罗毕
Laos|Vientiane|Asia|Lao|kip
Latvia|Riga|Europe|Latvian|euro
Lebanon|Beirut|Asia|Arabic|pound
Lithuania|Vilnius|Europe|Lithuanian|euro
Malaysia|Kuala Lumpur|Asia|Malay|ringgit|马来西亚|吉隆坡
Mexico|Mexico City|North America|Spanish|peso|墨西哥|墨西哥城
Mongolia|Ulaanbaatar|Asia|Mongolian|tugrik|蒙古|乌兰巴托
Morocco|Rabat|Africa|Arabic|dirham|摩洛哥|拉巴特
Nepal|Kathmandu|Asia|Nepali|rupee|尼泊尔|加德满都
Netherlands|Amsterdam|Europe|Dutch|euro|荷兰|阿姆斯特丹
New Zealand|Wellington|Oceania|English|New Zealand dollar|新西兰|惠灵顿
Nigeria|Abuja|Africa|English|naira|尼日利亚|阿布贾
Norway|Oslo|Europe|Norwegian|krone|挪威|奥斯陆
Pakistan|Islamabad|Asia|Urdu|rupee|巴基斯坦|伊斯兰堡
Panama|Panama City|North America|Spanish|balboa
Peru|Lima|South America|Spanish|sol|秘鲁|利马
Philippines|Manila|Asia|Filipino|peso|菲律宾|马尼拉
Poland|Warsaw|Europe|Polish|zloty|波兰|华沙
Portugal|Lisbon|Europe|Portuguese|euro|葡萄牙|里斯本
Romania|Bucharest|Europe|Romanian|leu
Russia|Moscow|Europe|Russian|ruble|俄罗斯|莫斯科
Saudi Arabia|Riyadh|Asia|Arabic|riyal|沙特阿拉伯|利雅得
Senegal|Dakar|Africa|French|franc
Serbia|Belgrade|Europe|Serbian|dinar
Singapore|Singapore|Asia|English|Singapore dollar|新加坡|新加坡
Slovakia|Bratislava|Europe|Slovak|euro
Slovenia|Ljubljana|Europe|Slovene|euro
South Korea|Seoul|Asia|Korean|won|韩国|首尔
Spain|Madrid|Europe|Spanish|euro|西班牙|马德里
Sudan|Khartoum|Africa|Arabic|pound
Sweden|Stockholm|Europe|Swedish|krona|瑞典|斯德哥尔摩
Switzerland|Bern|Europe|German|franc|瑞士|伯尔尼
Tanzania|Dodoma|Africa|Swahili|shilling
Thailand|Bangkok|Asia|Thai|baht|泰国|曼谷
Tunisia|Tunis|Africa|Arabic|dinar
Turkey|Ankara|Asia|Turkish|lira|土耳其|安卡拉
Uganda|Kampala|Africa|English|shilling
Ukraine|Kyiv|Europe|Ukrainian|hryvnia|乌克兰|基辅
United Kingdom|London|Europe|English|pound|英国|伦敦
United States|Washington|North America|English|dollar|美国|华盛顿
Uruguay|Montevideo|South America|Spanish|peso
Venezuela|Caracas|South America|Spanish|bolivar
Vietnam|Hanoi|Asia|Vietnamese|dong|越南|河内
""")

WITH_ARTICLE = frozenset({"Netherlands", "Philippines", "United Kingdom", "United States"})
"""Countries whose English name takes `the`."""

CONTINENT_ZH = {
    "Africa": "非洲",
    "Asia": "亚洲",
    "Europe": "欧洲",
    "North America": "北美洲",
    "Oceania": "大洋洲",
    "South America": "南美洲",
}

OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "fast": "slow",
    "old": "new",
    "long": "short",
    "wet": "dry",
    "light": "dark",
    "happy": "sad",
    "loud": "quiet",
    "rich": "poor",
    "early": "late",
    "up": "down",
    "left": "right",
    "open": "closed",
    "full": "empty",
    "hard": "soft",
    "strong": "weak",
    "clean": "dirty",
    "near": "far",
    "high": "low",
    "thick": "thin",
    "wide": "narrow",
    "true": "false",
    "day": "night",
    "first": "last",
    "above": "below",
    "inside": "outside",
}
YOUNG = {
    "cat": "kitten",
    "dog": "puppy",
    "cow": "calf",
    "horse": "foal",
    "sheep": "lamb",
    "goat": "kid",
    "pig": "piglet",
    "lion": "cub",
    "duck": "duckling",
    "hen": "chick",
    "goose": "gosling",
    "deer": "fawn",
    "frog": "tadpole",
    "swan": "cygnet",
    "owl": "owlet",
}
SOUNDS = {
    "cat": "meow",
    "dog": "woof",
    "cow": "moo",
    "sheep": "baa",
    "duck": "quack",
    "pig": "oink",
    "horse": "neigh",
    "frog": "croak",
    "bee": "buzz",
    "owl": "hoot",
    "lion": "roar",
    "snake": "hiss",
    "crow": "caw",
    "mouse": "squeak",
    "wolf": "howl",
}
LEGS = {
    "cat": 4,
    "dog": 4,
    "horse": 4,
    "cow": 4,
    "duck": 2,
    "hen": 2,
    "bird": 2,
    "ant": 6,
    "bee": 6,
    "moth": 6,
    "spider": 8,
    "snake": 0,
    "fish": 0,
    "frog": 4,
    "crab": 10,
    "tiger": 4,
    "swan": 2,
}
ELEMENTS = {
    "hydrogen": "H",
    "helium": "He",
    "carbon": "C",
    "nitrogen": "N",
    "oxygen": "O",
    "neon": "Ne",
    "sodium": "Na",
    "magnesium": "Mg",
    "silicon": "Si",
    "sulfur": "S",
    "chlorine": "Cl",
    "calcium": "Ca",
    "iron": "Fe",
    "copper": "Cu",
    "zinc": "Zn",
    "silver": "Ag",
    "tin": "Sn",
    "gold": "Au",
    "mercury": "Hg",
    "lead": "Pb",
}
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
)
COLOUR_OF = {
    "grass": "green",
    "the sky": "blue",
    "snow": "white",
    "coal": "black",
    "a banana": "yellow",
    "blood": "red",
    "a carrot": "orange",
    "milk": "white",
    "the sun": "yellow",
    "a lime": "green",
    "chocolate": "brown",
    "an orange": "orange",
    "a plum": "purple",
    "a flamingo": "pink",
}
