"""The words that may stand beside a value without changing it: units, and nouns that are counted.

A word that is not in these tables is not dropped: it could be "tenths", "lakh" or "doubled". To let
an answer have another unit, add it.
"""

from __future__ import annotations

# In the singular, or irregular plurals; with what stands between a number and its unit.
UNITS = frozenset(
  str.split(
    """
    a acorn acre ad additional adult after ago album alligator altogether amp ampere an animal
    annually ant antacid apart apartment apiece app appetizer apple are arm arrangement article
    artwork at athlete atmosphere attendee avocado away baby badge bag bale ball balloon banana
    bandage bar barrel basket batch bath battery bead beaker bear beat becquerel bed bee before
    beignet berry bicycle bike bill bird biscuit bit blister block blueberry boat bolt bone
    bonnet book bottle bouquet bowl box boy bracelet branch break brick brother brownie buck
    bucket bug builder building bulb bundle bunny burger bush bushel business button byte
    cabinet cake calf call calorie calory camper candle candy cane cap car card carnation
    carriage carrot carton case cat caterpillar cd cell celsius cent centimeter centimetre
    century chair change channel chapter character check cheese cheesecake chef cherry chicken
    child children chip chocolate circle claim class claw clay client clothing cloud clove
    clownfish coat coconut coffee coin color combination comic commencement computer contact
    container cookie copy corn coulomb country couple coupon course cow crab cracker cranberry
    crate crayon cricket crow crown cube cubic cucumber cup cupcake customer daily daisy
    dandelion decade decimeter decoration deep deer degree demerit dessert diagonal diaper diary
    dice die different digit dime dinar dinner dirham discount dish divisor doctor dog doll
    dollar donut door doughnut drawing dress driveway drop drum duck duckling dvd each ear
    earlier earring easter edge egg element elephant elf email employee envelope episode eraser
    euro every extra eye face factor fahrenheit family farad fathom feather feet fence fewer
    figurine file firecracker firework fish flashlight flavor flea flight floor flower fly flyer
    follower foot football for fortnight franc free friend frog from fruit fry furlong gallon
    game geese gemstone gift gigabyte gigahertz gigawatt giraffe girl glass gnome goal goat
    goldfish goose grain gram gramme grandchildren granola grape group guest guitar gumball
    gummy guppy haircut hamburger handshake hash hat heavy hectare hen henry hertz high
    highlighter hike hit hole home hoodie horse horseshoe hotdog hour house human ice in inch
    inches insect instance instruction integer iron item jacket jar jean jelly jellybean
    jellyfish jewel job joule juice jump kelvin kernel key kg kid kilo kilobit kilobyte
    kilocalorie kilogram kilogramme kilohertz kilojoule kilometer kilometre kilopascal kilowatt
    kitten knife knot krona krone lamb lap later latte lb leaf league left leg lego lemon less
    lesson letter level life lily limb line lion lira liter litre lizard llama load loaf log
    lollipop long lumen lux macaroon machine magazine magnet man mangoe marble marigold mark
    marker marshmallow mask match matchstick meal meat meatball medal megabit megabyte megahertz
    megawatt melon member men message metal meter metre mice micrometer micron microsecond mile
    milkshake millennia millennium milligram milligramme milliliter millilitre millimetre
    millisecond min mink minnow minute mistake model mole monkey monster month monthly more
    motorcycle mouse movie mph muffin multiple mushroom nail nanometer nanometre nanosecond
    napkin nautical necklace nephew new newspaper newton nickel night note notebook novel now
    number nut object of ohm old omelet on onion order oreo other ounce outcome outfit overall
    ox oxen oyster pack package packet page pail painting pair pallet pamphlet pan pancake panda
    pant papaya paper parent parking parsnip part participant pascal pass passenger pastry path
    patient paw peach peanut pear pebble pen pence pencil penguin penny people pepper per
    permutation person peso pet petal pfennig phone photo pickle picture pie piece pig pigeon
    pill pillow pin pine pineapple pinecone pint pitch pixel pizza plank plant plate player plum
    pocket point pointer pokemon polka poodle pool popsicle portion portrait postcard poster pot
    potato potted pound present problem product pup pupil puppy pushup puzzle quart question
    quilt rabbit racer radian rat real record remain remaining report ring rod roll room rooster
    root rose rouble round route row rubber ruble rung rupee sack sandwich sausage scarf school
    scoop screw seagull seashell season seat second section seed seedling segment sentence
    sequin serving session set setting shark sheep sheet shelf shell shilling shirt shoe shrimp
    sibling side signature singer sister site situp skein skip skirt slice smore snack snail
    snake snowball snowflake soccer sock soda solution song sour space spear spider spoke spool
    spoon spot sq square squat squirrel stair stamp star statue steak step steradian stick
    sticker stitch stocking story straw strawberry street string stripe student subject subset
    sucker suitcase sun sunflower surfer swan sweater table tablespoon tadpole tall tank
    tarantula tattoo teacher teacup team teaspoon teeth television tent terabyte term tesla test
    than the thick thing ticket tile time tin tip tire tissue toad today toddler toe together
    token tomato ton tonne tool toothbrush total touchdown towel toy trading train trash tray
    treat tree triangle trip troll trout truck tub tube tulip turtle tv twig unit value vampire
    vegetable vehicle vertex vertices video visit visitor volt vote wall walnut wand water
    watermelon watt way weasel weber weed week weekday weekly whale wheel whisker wide widget
    window wing wolf woman women won word worker worm worth yard yearly yen yuan zebra zit
    zombie
    """
  )
)
# Of languages with spaces, as they are written.
FOREIGN_UNITS = frozenset(
  str.split(
    """
    год года лет день дня дней час часа часов минута минуты минут секунда секунды секунд
    неделя недели недель месяц месяца месяцев рубль рубля рублей копеек доллар доллара
    долларов евро метр метра метров километр километра километров сантиметр сантиметров грамм
    грамма граммов килограмм килограммов литр литра литров раз раза штук штуки человек градус
    градуса градусов см км кг мм мл м г л ч día días año años mes meses semana semanas hora
    horas minuto minutos segundo segundos euro euros dólar dólares peso pesos metro metros
    kilómetro kilómetros centímetros gramos kilos litros personas manzanas veces grados niños
    an ans jour jours mois semaine semaines heure heures seconde secondes mètre mètres
    kilomètre kilomètres litres grammes personnes pommes fois degrés élèves tag tage tagen
    jahr jahre jahren monat monate woche wochen stunde stunden minuten sekunden äpfel
    kilometer zentimeter gramm kilogramm stück mal grad schüler kinder personen dia dias ano
    anos mês quilômetros pessoas maçãs vezes graus reais real anni giorni giorno ore ora
    minuti secondi metri chilometri persone mele volte gradi jaren dagen uur minuut weken
    maanden ngày giờ phút giây năm tháng tuần mét người quả cái con đồng hari jam menit detik
    tahun bulan minggu orang buah gün saat dakika saniye yıl ay hafta kişi lira dni dzień
    godzin godziny minut sekund lat rok złotych zł يوم أيام ساعة ساعات دقيقة دقائق ثانية سنة
    سنوات شهر أشهر أسبوع متر كيلومتر كيلو غرام كغ لتر دولار دينار شخص تفاحة مرات मीटर किलोमीटर
    रुपये रुपए दिन घंटे मिनट सेकंड साल महीने किलो ग्राम लीटर बार लोग सेब
    """
  )
)
# Of languages without spaces: how a unit begins, as in 个苹果.
UNIT_STARTS = tuple(
  str.split(
    """
    元 块 塊 角 分钱 圆 円 원 米 公里 千米 厘米 毫米 公分 平方 立方 升 毫升 克 千克 公斤 斤 吨
    噸 秒 分钟 分鐘 小时 小時 时 時 点 天 日 周 週 星期 月 个月 個月 年 岁 歲 度 页 頁 次 倍
    人 个 個 只 隻 支 枝 本 件 条 條 张 張 辆 輛 台 座 间 間 棵 朵 颗 顆 粒 把 双 雙 对
    對 组 組 袋 箱 盒 瓶 杯 碗 包 根 名 位 头 頭 匹 首 家 层 層 步 题 題 种 種 枚 冊 册
    歩 つ メートル キロ グラム リットル 時間 分間 秒間 ドル ユーロ センチ ミリ 시간 분 초 일 주
    개월 달 년 살 명 개 마리 권 자루 송이 그루 미터 킬로미터 센티미터 그램 킬로그램 리터 번 회 장
    대 병 잔 점 쪽 달러 도 세
    """
  )
)


def is_unit(word: str) -> bool:
  """Returns whether a word of ASCII is a unit, in the singular or the plural."""
  word = word.lower()
  forms = (word, word.removesuffix("s"), word.removesuffix("es"), f"{word.removesuffix('ies')}y")
  return not UNITS.isdisjoint(forms[: 4 if word.endswith("ies") else 3])
